# The main commands set up all that they need: `make demo`, `make serve` and `make test`. `make` alone lists all.

PYTHON := .venv/bin/python

# Where bytecode must not be kept, all of the hundreds of processes of a run of the suite would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo serve test mysql mysqlclient celery lint mypy pyright imports mutants bench race faults product nemesis pooler matrix versions dist messages screenshots docs pictures clean

help: ## What there is; `make` alone prints it too
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/\1\t\2/p' Makefile | expand -t 14

demo: ## Sell the last items without and with the lock: make demo [DB=sqlite|postgresql|mysql] [PROCS=8] [STOCK=200] [APP=celery]
	@sh scripts/setup demo $(DB)
	@DB=$(DB) PROCS=$(PROCS) STOCK=$(STOCK) $(PYTHON) -m example_project.$(if $(APP),$(APP)_)demo

serve: ## The example shop, with all of its processes: make serve [DB=sqlite|postgresql|mysql] [BROKER=files|redis] [PORT=8000]
	@sh scripts/setup serve $(or $(DB),sqlite) $(BROKER)
	@DB=$(DB) BROKER=$(BROKER) PORT=$(PORT) exec $(PYTHON) -m example_project.serve

test: ## The whole suite, on servers that it starts itself; workers and brokers after the rest, which they would slow down
	@sh scripts/setup test
	@$(PYTHON) -m pytest $(or $(ARGS),-m "not workers")
	@$(if $(ARGS),true,$(PYTHON) -m pytest -n 3 -m workers tests/celery)

mysql: ## What concerns MySQL, on MySQL itself: in a tree of its own (Debian, root), or on MYSQL_URL=mysql://user@host:port
	@sh scripts/setup mysql
	@sh scripts/setup test
	@$(PYTHON) -m pytest -k mysql $(ARGS)

mysqlclient: ## What concerns MariaDB and MySQL, through mysqlclient in PyMySQL's place: make mysqlclient [ARGS=...]
	@sh scripts/setup test
	@sh scripts/setup mysqlclient
	@DBLOCK_MYSQLCLIENT=1 $(PYTHON) -m pytest -k "mariadb or mysql" $(ARGS)

lint: ## Style, types and the direction of imports
	@sh scripts/setup test
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(MAKE) --no-print-directory -j 2 mypy pyright imports

mypy pyright:
	@$(PYTHON) -m $@

imports:
	@.venv/bin/lint-imports

mutants: ## Every statement with one condition less, on every database: a test has to notice: make mutants [ARGS="-k grant"]
	@sh scripts/setup test
	@$(PYTHON) -m pytest tests/statements/test_statements.py tests/statements/mutants.py $(ARGS)

bench: ## Rates as ratios to bare SQL in the same run, and what the server counts: make bench [ROUNDS=15]
	@sh scripts/setup test
	@missed=0; for part in uncontended leases family majority handoff stampede distance tasks reaping observing; do \
	    ROUNDS=$(or $(ROUNDS),15) $(PYTHON) -m benchmarks.$$part || missed=1; done; exit $$missed

race: ## The peers side by side, polling against listening, and docs/benchmarks.md: make race [QUICK=1] [ROUNDS=3] [CAP=30] [RESUME=1]; quick: .build/race
	@sh scripts/setup test
	@sh scripts/setup race
	@[ -n "$(RESUME)" ] && [ ! -e .build/experiment-$(if $(QUICK),quick,full).jsonl ] || \
	    $(PYTHON) -m benchmarks.race experiment $(if $(QUICK),--quick) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(CAP),--cap $(CAP)) $(if $(RESUME),--resume)
	@$(PYTHON) -m benchmarks.race $(if $(QUICK),--quick) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(RESUME),--resume)

celery: ## Locked tasks on RabbitMQ and Redis in full numbers, with kills and restarts: `make test` has a short form
	@sh scripts/setup test
	@DBLOCK_CELERY=long $(PYTHON) -m pytest -n 2 --timeout 900 tests/celery $(ARGS)

faults: docs ## Kills, cuts, pauses and races in the numbers that the contract asks for; `make test` has a short form
	@sh scripts/setup test
	@DBLOCK_FAULTS=long $(PYTHON) -m pytest --timeout 7200 tests/faults tests/servers/test_listener.py tests/servers/test_pooler.py \
	    tests/servers/test_sessions.py tests/servers/test_fork.py tests/core/test_small_worlds.py tests/core/test_sharing_worlds.py tests/statements/test_texts.py \
	    tests/django/test_inspector.py tests/django/test_users_suites.py tests/testing/test_recorder.py \
	    tests/commands/test_run.py tests/commands/test_foreign_texts.py tests/browser/test_shop.py tests/browser/test_documentation.py tests/project/test_recipes.py $(ARGS)

product: ## The contract in every cell: each test on each database, face and driver, whatever it is about
	@sh scripts/setup test
	@DBLOCK_PRODUCT=1 $(PYTHON) -m pytest --timeout 600 tests/contract $(ARGS)

nemesis: ## One random run over all databases, faults and kinds of locks, and its table in docs/proof.md: make nemesis [OPERATIONS=1000000] [SEED=] [MINUTES=] [WORLDS=4]
	@sh scripts/setup test
	@$(PYTHON) -m tests.support.nemesis $(if $(OPERATIONS),--operations $(OPERATIONS)) $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(WORLDS),--worlds $(WORLDS))

pooler: ## The suite through PgBouncer in transaction mode, as far as it is about PostgreSQL; `make test` has a short form
	@sh scripts/setup test
	@DBLOCK_POOLER=1 $(PYTHON) -m pytest $(ARGS)

matrix: ## The suite over Python 3.11 to 3.13, oldest and newest Django and SQLAlchemy (interpreters from PATH or pyenv)
	@sh scripts/setup test
	@PATH="$$PATH$$(printf ':%s' $(HOME)/.pyenv/versions/3.1[123].*/bin)" .venv/bin/tox $(ARGS)

versions: ## The suite on Python 3.14 and 3.15; statements, contract and short faults on each server that can be had: make versions [NAME=postgresql-14]
	@sh scripts/setup test
	@sh scripts/setup versions
	@$(PYTHON) -m tests.versions $(NAME) $(if $(ARGS),-- $(ARGS))

dist: ## Wheel and source archive into dist/, checked, and tried in an empty environment of each Python: make dist [URL=...]
	@sh scripts/setup dist
	@URL=$(URL) $(PYTHON) -m scripts.dist

messages: ## The catalogues of translations, made from the sources again, and compiled (Debian: apt-get install gettext)
	@sh scripts/setup test
	@command -v msgfmt >/dev/null || { echo "make messages needs gettext" >&2; exit 1; }
	@cd dblock && $(abspath $(PYTHON)) -P -m django makemessages --all --no-obsolete --no-wrap --add-location file
	@sed -i '/^"\(POT-Creation-Date\|Report-Msgid-Bugs-To\)/d' dblock/locale/*/LC_MESSAGES/django.po
	@cd dblock && $(abspath $(PYTHON)) -P -m django compilemessages

screenshots: ## The pictures of the docs, of the admin, a terminal and the shop, as they look now: make screenshots [ARGS=admin|shop]
	@sh scripts/setup test
	@$(PYTHON) -m tests.browser.screenshots $(ARGS)

docs: ## The documentation site, into .build/docs/index.html; warnings are errors. EXTERNAL=1 also asks whether links to other sites work
	@sh scripts/setup docs
	@$(PYTHON) -m sphinx -M html docs .build/docs -W --keep-going -n -q -j 2 && echo "file://$(CURDIR)/.build/docs/html/index.html"
	@$(if $(EXTERNAL),$(PYTHON) -m sphinx -M linkcheck docs .build/docs,true)

pictures: ## The drawings of the docs, light and dark
	@sh scripts/setup test
	@$(PYTHON) -m scripts.pictures

clean: ## Remove what was built, the virtual environment too
	rm -rf .venv .tox .build dist

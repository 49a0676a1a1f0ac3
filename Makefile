# Both main commands set up all that they need: `make demo` and `make test`.

PYTHON := .venv/bin/python

.PHONY: demo test mysql lint mutants bench faults pooler matrix clean

demo: ## Sell the last items without and with the lock: make demo [DB=sqlite|postgresql|mysql] [PROCS=8] [STOCK=200]
	@sh scripts/setup demo $(DB)
	@DB=$(DB) PROCS=$(PROCS) STOCK=$(STOCK) $(PYTHON) -m example_project.demo

test: ## The whole suite, on servers that it starts itself
	@sh scripts/setup test
	@$(PYTHON) -m pytest $(ARGS)

mysql: ## What concerns MySQL, on MySQL itself: in a tree of its own (Debian, root), or on MYSQL_URL=mysql://user@host:port
	@sh scripts/setup mysql
	@sh scripts/setup test
	@$(PYTHON) -m pytest -k mysql $(ARGS)

lint: ## Style, types and the direction of imports
	@sh scripts/setup test
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
	@$(PYTHON) -m pyright
	@.venv/bin/lint-imports

mutants: ## Every statement with one condition less, on every database: a test has to notice: make mutants [ARGS="-k grant"]
	@sh scripts/setup test
	@$(PYTHON) -m pytest tests/statements/test_statements.py tests/statements/mutants.py $(ARGS)

bench: ## Rates as ratios to bare SQL in the same run, and what the server counts: make bench [ROUNDS=15]
	@sh scripts/setup test
	@missed=0; for part in uncontended leases handoff contended peers; do \
	    ROUNDS=$(or $(ROUNDS),15) $(PYTHON) -m benchmarks.$$part || missed=1; done; exit $$missed

faults: ## Kills, cuts, pauses and races in the numbers that the contract asks for; `make test` has a short form
	@sh scripts/setup test
	@DBLOCK_FAULTS=long $(PYTHON) -m pytest --timeout 7200 tests/faults tests/core/test_small_worlds.py $(ARGS)

pooler: ## The suite through PgBouncer in transaction mode, as far as it is about PostgreSQL; `make test` has a short form
	@sh scripts/setup test
	@DBLOCK_POOLER=1 $(PYTHON) -m pytest $(ARGS)

matrix: ## The suite over Python 3.11 to 3.13, oldest and newest Django and SQLAlchemy (interpreters from PATH or pyenv)
	@sh scripts/setup test
	@PATH="$$PATH$$(printf ':%s' $(HOME)/.pyenv/versions/3.1[123].*/bin)" .venv/bin/tox $(ARGS)

clean:
	rm -rf .venv .tox .build dist

"""compose.yaml, as far as it can be checked where no container engine runs: it says what the code has."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from typing import Any

import yaml

from example_project import backroom
from tests.support.loaded import python, without
from tests.support.pages import ROOT

FILE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"] == "dblock-shop"}
CODE = {path: path.read_text() for path in (ROOT / "example_project").glob("*.py")}


def test_services_wait_for_services_that_can_be_waited_for() -> None:
    """Each one that is waited for exists, and has a health check or ends by itself."""
    for service in SERVICES.values():
        for name, how in service.get("depends_on", {}).items():
            ends = SERVICES[name].get("restart") == "on-failure"
            assert how["condition"] == ("service_completed_successfully" if ends else "service_healthy")
            assert ends or "healthcheck" in SERVICES[name]


def test_every_command_starts_what_there_is() -> None:
    """A module of the example with the name that it is to have, or a role of a clerk; each role has a service."""
    roles: dict[str, int] = {}
    for name, service in OURS.items():
        command = service["command"]
        [module] = {found[0] for each in command if (found := re.match(r"example_project\.\w+", each))}
        assert importlib.util.find_spec(module), name
        if target := next((each.partition(":")[2] for each in command if each.startswith(f"{module}:")), ""):
            assert re.search(rf"^{target}\b.* = ", (ROOT / f"{module.replace('.', '/')}.py").read_text(), re.MULTILINE)
        if module == "example_project.backroom":
            roles[command[3]] = service.get("deploy", {}).get("replicas", 1)
    assert roles == {role: [each for each, _ in backroom.CLERKS].count(role) for role in backroom.ROLES}


def test_the_environment_is_that_of_the_settings() -> None:
    """Each variable is one that the example reads; with it Django, Celery and SQLAlchemy find the same servers."""
    for service in OURS.values():
        assert not [name for name in service["environment"] if not any(f'"{name}"' in code for code in CODE.values())]
    code = """
import json
from django.conf import settings
from example_project.warehouse import async_url
found = settings.DATABASES["default"]
print(json.dumps([
    [found["ENGINE"].rpartition(".")[2], found["USER"], found["PASSWORD"], found["HOST"], found["PORT"], found["NAME"]],
    async_url().render_as_string(hide_password=False), settings.CELERY_BROKER_URL, settings.MARKET_API]))
"""
    environment = {**OURS["shop"]["environment"], "DJANGO_SETTINGS_MODULE": "example_project.settings"}
    done = python("-c", code, environment=without("DATABASE", "CELERY") | environment)
    database, url, broker, market = json.loads(done.stdout)
    given = SERVICES["postgresql"]["environment"]
    user, password, name = (given[f"POSTGRES_{each}"] for each in ("USER", "PASSWORD", "DB"))
    assert database == ["postgresql", user, password, "postgresql", "5432", name]
    assert url == f"postgresql+psycopg://{user}:{password}@postgresql:5432/{name}"
    assert broker == "redis://redis:6379/0"
    assert market == "http://market:8001"


def test_ports_and_image() -> None:
    """Nothing is open to other machines; the image has what the commands need, by extras that there are."""
    for name, service in SERVICES.items():
        for port in service.get("ports", ()):
            host, outside, inside = port.split(":")
            assert host == "127.0.0.1", name
            assert outside == inside == service["command"][-1]
    text = (ROOT / "example_project/Dockerfile").read_text()
    found = re.search(r'"\.\[(.*)\]"', text)
    assert found
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(found[1].split(",")) <= set(extras)
    assert {each.partition(">")[0] for each in extras["shop"]} == {"rich", "celery[redis]", "fastapi", "uvicorn"}

"""The market stall: another seller of the same stock, which is FastAPI and SQLAlchemy and knows nothing of Django.

`uvicorn example_project.market:app`. The keys are those of the shop, and so the two take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from pydantic import BaseModel
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from example_project.warehouse import Buyer, Item, asell, async_url
from sqlalchemy_dblock import LockLost, LockTimeout, db_lock, release_all

PAYMENT = float(os.environ.get("PAYMENT", "0.3"))
SHOP_URL = os.environ.get("SHOP_URL", "")
"""Where browsers find the shop, to which they return from here."""
engine = create_async_engine(
    async_url(),
    connect_args={"timeout": 20} if async_url().get_backend_name() == "sqlite" else {},
    execution_options={"dblock_history": 10_000},
)
running: set[asyncio.Task[None]] = set()


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await release_all(engine)
    await engine.dispose()


app = FastAPI(title="The market stall of Last Ones", lifespan=lifespan)


@app.get("/stock/{sku}")
async def stock(sku: str) -> dict[str, Any]:
    """How many there are."""
    async with AsyncSession(engine) as session:
        item = await session.get(Item, sku)
    if item is None:
        raise HTTPException(404, f"there is no {sku}")
    return {"sku": sku, "name": item.name, "stock": item.stock}


@app.post("/sell/{sku}")
async def sell(sku: str, request: Request) -> Response:
    """Sell one item, in turn with the shop: JSON for programs; a browser goes back to the shop."""
    _ = await stock(sku)
    sold: bool | None = None
    try:
        async with db_lock(engine, f"stock:{sku}", timeout=5, label="market stall") as lock:
            sold = await asell(engine, sku, "market", PAYMENT, lock)
    except (LockTimeout, LockLost):
        pass  # once asell() has returned, what it has sold is sold
    result, status = {True: ("sold", 200), False: ("out", 409), None: ("busy", 503)}[sold]
    if SHOP_URL and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(f"{SHOP_URL}/item/{sku}/?market={result}", status_code=303)
    return JSONResponse({"result": result}, status_code=status)


class Rivals(BaseModel):
    """The buyers of a race who come to the stall: their rows, and when each of them comes."""

    sku: str
    locked: bool
    begun: float
    pause: float
    buyers: list[tuple[int, int, float]]


@app.post("/rivals", status_code=202)
async def rivals(race: Rivals) -> dict[str, int]:
    """Let them come."""
    for row, number, asked in race.buyers:
        task = asyncio.create_task(visit(race, row, number, asked))
        running.add(task)
        task.add_done_callback(running.discard)
    return {"buyers": len(race.buyers)}


async def visit(race: Rivals, row: int, number: int, asked: float) -> None:
    """One buyer, as `shop.rivals.visit`."""
    await asyncio.sleep(max(0.0, race.begun + asked - time.time()))
    lock = db_lock(engine, f"stock:{race.sku}", timeout=60, label=f"buyer {number}, FastAPI")
    async with lock if race.locked else contextlib.nullcontext():
        fence = lock.fence if race.locked else None
        await note(row, entered=time.time() - race.begun, fence=fence)
        sold = await asell(engine, race.sku, f"buyer {number}", race.pause, lock if race.locked else None)
        left = time.time() - race.begun
    await note(row, left=left, sold=sold)


async def note(row: int, **values: Any) -> None:
    async with engine.begin() as connection:
        await connection.execute(update(Buyer).where(Buyer.id == row).values(**values))

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST

from dblock import LockTimeout, db_lock
from example_project.shop.models import Item, sell


def shelf(request: HttpRequest) -> HttpResponse:
    return render(request, "shop/shelf.html", {"items": Item.objects.order_by("name")})


@require_POST
def checkout(request: HttpRequest, sku: str) -> HttpResponse:
    """Sell one item; customers of the same item take turns."""
    item = get_object_or_404(Item, sku=sku)
    try:
        with db_lock(f"stock:{sku}", timeout=5, label="checkout"):
            sold = sell(sku, "web")
    except LockTimeout:
        items = Item.objects.order_by("name")
        messages.error(request, f"Too many customers want the {item.name} at the moment, please try again.")
        return render(request, "shop/shelf.html", {"items": items}, status=503)
    if sold:
        messages.success(request, f"You bought one {item.name}.")
    else:
        messages.error(request, f"{item.name} is sold out.")
    return redirect("shelf")

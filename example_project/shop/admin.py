from __future__ import annotations

from django.contrib import admin

from example_project.shop.models import Item, Sale


@admin.register(Item)
class ItemAdmin(admin.ModelAdmin):
    list_display = ("name", "sku", "stock")


@admin.register(Sale)
class SaleAdmin(admin.ModelAdmin):
    list_display = ("item", "seller", "sold_at")

from __future__ import annotations

from django.contrib import admin

from example_project.shop.models import Deal, Item, Sale

admin.site.site_header = admin.site.site_title = "The back office of Last Ones"


@admin.register(Item)
class ItemAdmin(admin.ModelAdmin):
    list_display = ("name", "sku", "stock", "euros", "shown")


@admin.register(Sale)
class SaleAdmin(admin.ModelAdmin):
    list_display = ("item", "seller", "fence", "sold_at")


@admin.register(Deal)
class DealAdmin(admin.ModelAdmin):
    list_display = ("item", "term", "changed_at")

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from example_project.shop import views

urlpatterns = [
    path("", views.shelf, name="shelf"),
    path("checkout/<slug:sku>/", views.checkout, name="checkout"),
    path("admin/", admin.site.urls),
]

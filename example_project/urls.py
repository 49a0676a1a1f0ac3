from __future__ import annotations

from django.contrib import admin
from django.urls import path

from example_project.shop import views

urlpatterns = [
    path("", views.shelf, name="shelf"),
    path("item/<slug:sku>/", views.item_page, name="item"),
    path("checkout/<slug:sku>/", views.checkout, name="checkout"),
    path("give-back/<slug:sku>/", views.give_back, name="give_back"),
    path("rivals/", views.race, name="rivals"),
    path("rivals/<int:number>/", views.race, name="race"),
    path("rivals/<int:number>/events/", views.race_events, name="race_events"),
    path("back-room/", views.back_room, name="backroom"),
    path("back-room/events/", views.back_room_events, name="backroom_events"),
    path("back-room/kill/", views.kill_leader, name="kill_leader"),
    path("tasks/", views.errands, name="errands"),
    path("tasks/events/", views.errand_events, name="errand_events"),
    path("tasks/send/<slug:policy>/", views.send, name="send"),
    path("admin/", admin.site.urls),
]

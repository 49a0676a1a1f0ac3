"""Make the tables, put the goods on the shelves, and make a login for the admin: `python -m example_project.stocked`.

It may run again: what has been sold stays sold. Where it may run on several machines at once, run it as
`manage.py dblock run --create-tables migrate -- python -m example_project.stocked`.
"""

from __future__ import annotations

import os

PRODUCTS = [
    ("mug", "Hand-thrown mug", 2400, 12, "Speckled stoneware, thrown in Leipzig. Holds a long morning."),
    ("lamp", "Paper lamp", 5900, 4, "Folded washi over a bamboo frame. Light like late afternoon."),
    ("plant", "Rubber plant", 3200, 7, "Ficus elastica in a clay pot. Forgives a holiday."),
    ("print", "Riso print", 1800, 9, "Two colours, 80 numbered copies. These are the ones left."),
    ("stool", "Oak stool", 11900, 2, "Three legs, one plank, no screws. Never wobbles."),
    ("clock", "Desk clock", 7400, 1, "The very last one. Open this page in two windows and buy it twice."),
]


def main() -> None:
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    django.setup()
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.db import connections

    from example_project.shop.models import Item

    call_command("migrate", verbosity=0)
    for sku, name, price, stock, blurb in PRODUCTS:
        Item.objects.get_or_create(sku=sku, defaults={"name": name, "price": price, "stock": stock, "blurb": blurb})
    if not User.objects.filter(username="admin").exists():
        User.objects.create_superuser("admin", password="admin")
    connections.close_all()


if __name__ == "__main__":
    main()

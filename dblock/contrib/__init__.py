"""What other tools are told of locks, each an extra of its own.

Rule: all of it stands upon what is public: `observe`, and the lock's methods. `prometheus` and `opentelemetry` serve
both faces and import neither; what needs Django says so.
"""

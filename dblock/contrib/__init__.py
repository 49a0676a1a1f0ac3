"""What other tools are told of locks, each an extra of its own.

Rule: all of it stands upon what is public: `observe`, and the lock's methods. `prometheus` and `opentelemetry` serve
both faces and import neither; `health` imports the one that it is asked about; what needs Django says so.
"""

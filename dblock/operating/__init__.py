"""What operators see and do: administration, history, who pins a key, the inspector in Django's admin, the commands.

Rule: `administration`, `history`, `pins` and `statements` need the standard library and `dblock.core`
only. Django's are `inspector`, `timeline` and `wording`.
"""

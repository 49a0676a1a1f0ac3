"""The protocol of the lock, free of any framework: standard library only.

    faces -> waiting -> protocol -> steps -> statements
      |                                ^
      '---------> drivers -------------'

A face's operation is a generator of steps; a driver runs the steps with an executor, which is all that Django and
SQLAlchemy each bring along.
"""

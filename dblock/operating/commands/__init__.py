"""The operator's commands, the same for `manage.py dblock` and for `dblock --url`.

    console    what is printed: tables, JSON, lengths of time; questions
    context    what a face gives to the commands
    parser     the command line
    show       ls, show
    release    release, reap
    running    run
    top        top
    checkup    doctor

Rule: a verb is a function of a context and the parsed options that returns its exit status.
"""

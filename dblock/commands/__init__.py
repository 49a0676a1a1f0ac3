"""The operator's commands, the same for `manage.py dblock` and for `dblock --url`.

    console    what is printed: tables, JSON, lengths of time; questions
    desk       what a face gives to the commands
    parser     the command line
    looking    ls, show
    ending     release, reap
    running    run
    watching   top
    doctor     doctor; its checks are in `checkup`

Rule: a verb is a function of a desk and the parsed options that returns its exit status.
"""

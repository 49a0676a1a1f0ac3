"""The lock, free of any framework: standard library only. docs/architecture.md draws its packages from the bottom up.

Rule: a package imports only from those below it. An operation is a generator of steps; `protocol.drive` runs it, and a
face's store executes its statements.

Where to look for:

    where a key is taken          `acquire.acquiring`, for `lock.entering`; `acquire.waiting` waits for it
    what keeps it                 `watchdog.renewals` renews its lease, which `holding.lease` trusts until a local time
    where it is lost              `holding.lease`, by time; `watchdog.watchdog` tells the holder;
                                  `protocol.tenures.why_lost` reads the reason
    how it is left                `lock.leaving`; `acquire.handover` hands it to the next, or frees it
    what an interrupt undoes      `protocol.drive` throws it into the steps; `acquire.local_queue` says what each stage
                                  may leave behind, which `acquire.waiting.Attempt.clean_up` undoes
    who is next                   in this process `acquire.local_queue`, among processes `protocol.queue`
    what happens on a fork        `runtime.Runtime.forked`
    where an option goes          `options.Given` explains it, `options.valid_options` checks it
    what a thread is for          `worker`: each is a `Worker`, or is begun by `start`
    how long something takes      `timing.Timing`
    what others are told          `observing`
"""

"""The lock, free of any framework: standard library only. docs/architecture.md draws its packages from the bottom up.

Rule: a package imports only from those below it. An operation is a generator of steps; `protocol.drive` runs it, and a
face's store executes its statements.

Where to look for:

    when trust in a lease ends    `values.Grant.trusted_until` computes it, `holding.lease.Lease` keeps it
    what frees a key              `statements.common.release`; `acquire.handover.pass_on` grants it to the next instead
    who is next                   in this process `acquire.local_queue`, among processes `protocol.queue`
    what happens on a fork        `runtime.Runtime.forked`
    where an option goes          `options.Given` explains it, `options.valid_options` checks it
    what a thread is for          `worker`: each is a `Worker`, or is begun by `start`; `deliveries` has one of its own
    how long something takes      `timing.Timing`
    what others are told          `observing`
"""

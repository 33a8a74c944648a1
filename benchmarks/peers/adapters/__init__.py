"""One module for each queue, imported only in that queue's own interpreter.

Each has ``Peer(dsn, settings)`` with the methods ``install()``, ``bulk(count)`` (one call of the bulk API and its
commit), ``singles(count)`` (one call a job, one transaction), ``single(number)`` (one call, committed) and
``work(job)``, which works until it is cancelled or the process ends and calls ``job`` for each job. All of them, and
``job``, are coroutine functions, except where :mod:`benchmarks.peers.inside` says otherwise.
"""

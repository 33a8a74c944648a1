"""Faults on purpose: real runners and producers, a real server, and a ledger that the queue does not keep itself.

``python -m chaos`` (``make chaos``) runs scenarios. Each has a PostgreSQL of its own, runner processes
(``python -m sqla_neoq.run``), producer processes, and where it needs one a TCP proxy in between; it breaks something,
repairs it, waits until all is quiet, and then compares three records that know nothing of each other:

* the *ledger*, a file to which producers and tasks append what they did (``ledger``);
* the *effects*, a table that tasks write through ``job.session``;
* the *moves*, a table that a trigger of the harness fills with every change of a job's state.

========================  ==============================================================================
``ledger``                the file, and what follows from it
``verdict``               compares the three: lost, doubled, fence broken
``proxy``                 delays, cuts, half-opens, and cuts at a chosen round trip
``server``                a PostgreSQL that can be restarted, stopped, and told to refuse
``tasks``, ``producer``   what runners run, and who enqueues
``world``                 all of it in one place, as a scenario sees it
``scenario``              what a scenario is, and how one is run
``scenarios/``            the scenarios, one module for each family
``soak``                  very many jobs, with a fault every few seconds
``report``                the table, for people and for the documents
========================  ==============================================================================
"""

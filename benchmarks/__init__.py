"""What the library costs, measured beside the raw SQL loop in the same run.

``python -m benchmarks`` measures what docs/performance.md shows; its ``--help`` says what else there is.

========================  ==================================================================================
:mod:`.database`          the server to measure on, its facts, and a database that is thrown away
:mod:`.jobs`              the tasks, and jobs put into the table by SQL
:mod:`.raw`               the same work with psycopg alone: what there is to compare with
:mod:`.scenarios`         each measurement, alternating between the library and the raw loop
:mod:`.report`            figures as a table, as JSON and as a block in the documents
========================  ==================================================================================

An absolute figure belongs to one machine at one hour; the ratio to the raw loop is what compares.
"""

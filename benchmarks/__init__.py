"""What the library costs, measured beside the raw SQL loop in the same run.

``python -m benchmarks`` measures what docs/performance.md shows; its ``--help`` says what else there is.

========================  ==================================================================================
:mod:`.database`          the server to measure on, its facts, and a database that is thrown away
:mod:`.jobs`              the tasks, and jobs put into the table by SQL
:mod:`.raw`               the same work with psycopg alone: what there is to compare with
:mod:`.bench`             what every scenario works with: sizes, rounds, connections, the timing of a drain
:mod:`.processes`         workers, producers and pgbench, each a process of its own
:mod:`.meters`            processor time, memory, WAL, commits and queries
:mod:`.scenarios`         the measurements, alternating between the library and what it is compared with
:mod:`.figures`           what a measurement yields
:mod:`.report`            figures as a table, as JSON and as blocks in the documents
:mod:`.plots`             figures as SVG files
========================  ==================================================================================

An absolute figure belongs to one machine at one hour; the ratio to the raw loop is what compares.
"""

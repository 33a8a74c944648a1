"""neoq_enqueue and neoq_enqueue_many: what the Python call checks, sets and returns, for everybody who speaks SQL."""

import json
import shutil
import subprocess
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import create_engine, make_url
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from support import eventually
from support.hosts import psql
from support.servers import libpq
from support.wakeups import ears

from sqla_neoq import NewJob, enqueue, enqueue_many, migrations
from sqla_neoq.migrations.rights import grants
from sqla_neoq.payloads import decode, encode

MIB = 1024 * 1024


@pytest.fixture
def connection(database_url):
    with closing(psycopg.connect(libpq(make_url(database_url)), autocommit=True)) as connection:
        yield connection


def call(connection, queue, payload=None, /, **options):
    """Call the function for one job; return its id."""
    query = "SELECT neoq_enqueue(%s, %s::jsonb, %s::jsonb)"
    values = [queue, None if payload is None else json.dumps(payload), json.dumps(options)]
    return connection.execute(query, values).fetchone()[0]


def call_many(connection, jobs):
    """Call the function for many jobs; return (id, created) of each."""
    return connection.execute("SELECT * FROM neoq_enqueue_many(%s::jsonb)", [json.dumps(jobs)]).fetchall()


def row(connection, id_):
    columns = "queue, task, priority, payload, fingerprint, max_retries, status, run_after, deadline, created_at"
    with connection.cursor(row_factory=psycopg.rows.namedtuple_row) as cursor:
        return cursor.execute(f"SELECT {columns} FROM neoq_jobs WHERE id = %s", [id_]).fetchone()


def test_a_queue_is_enough(connection):
    job = row(connection, connection.execute("SELECT neoq_enqueue('greetings')").fetchone()[0])
    assert job[:7] == ("greetings", None, 0, {}, None, None, "new")
    assert job.run_after == job.created_at
    assert job.deadline is None


def test_a_null_is_what_was_left_out_but_a_payload_may_be_null(connection):
    nothing = dict.fromkeys(("task", "priority", "deadline", "run_after", "max_retries", "unique", "fingerprint"))
    assert row(connection, call(connection, "q", None, **nothing))[:7] == ("q", None, 0, {}, None, None, "new")
    (null,) = connection.execute("SELECT neoq_enqueue('q', 'null')").fetchone()
    assert row(connection, null).payload is None
    (one,) = call_many(connection, [{"queue": "q"}])
    assert row(connection, one[0]).payload == {}
    (id_,) = connection.execute("SELECT neoq_enqueue('q', NULL, NULL)").fetchone()
    assert row(connection, id_)[:7] == ("q", None, 0, {}, None, None, "new")


@pytest.mark.parametrize("unusual", ["' \" \\ % :x $1 {} \n\t", "ü 🚀 \u2028", "q" * 128])
def test_every_option_and_every_text_arrives(connection, unusual):
    payload = {unusual: [unusual, 1.5, None, True]}
    options = {"task": unusual, "priority": -100, "max_retries": 0, "fingerprint": unusual}
    job = row(connection, call(connection, unusual, payload, **options))
    assert job[:6] == (unusual, unusual, -100, payload, unusual, 0)


@pytest.mark.parametrize(
    ("written", "delay"),
    [(90, 90), (0.5, 0.5), ("1 hour", 3600), ("PT2M", 120), ("00:00:01.5", 1.5), ("36525 days", 36525 * 86400), (0, 0)],
)
def test_a_number_of_seconds_or_an_interval_counts_from_now(connection, written, delay):
    connection.execute("BEGIN")
    id_ = call(connection, "q", run_after=written, deadline=written)
    began = connection.execute("SELECT now()").fetchone()[0]
    job = row(connection, id_)
    connection.execute("COMMIT")
    assert job.run_after == job.deadline
    assert timedelta(0) <= job.run_after - began - timedelta(seconds=delay) < timedelta(seconds=60)


@pytest.mark.parametrize(
    "written",
    [
        "2030-01-31T12:00:00Z",
        " 2030-01-31 12:00:00 Z ",
        "2030-01-31 14:00:00+02",
        "2030-01-31T17:30:00.000000+05:30",
        "2030-01-31 12:00 UTC",
    ],
)
def test_a_time_with_its_zone_is_that_time_whatever_the_session_s(connection, written):
    connection.execute("SET TIME ZONE 'Asia/Tokyo'")
    connection.execute("SET DateStyle = 'German, DMY'")
    connection.execute("SET standard_conforming_strings = off")
    id_ = call(connection, "q", run_after=written, deadline=written)
    connection.execute("RESET DateStyle")
    connection.execute("RESET standard_conforming_strings")
    job = row(connection, id_)
    assert job.run_after == job.deadline == datetime(2030, 1, 31, 12, tzinfo=UTC)


def test_what_postgresql_makes_of_a_time_is_one(connection):
    connection.execute("SET TIME ZONE 'America/St_Johns'")
    options = "jsonb_build_object('run_after', now() + interval '1 day', 'deadline', interval '1 hour')"
    (id_,) = connection.execute(f"SELECT neoq_enqueue('q', options => {options})").fetchone()
    job = row(connection, id_)
    assert abs(job.run_after - job.created_at - timedelta(days=1)) < timedelta(seconds=1)
    assert abs(job.deadline - job.created_at - timedelta(hours=1)) < timedelta(seconds=60)


REFUSED = [
    ("", {}, "22023", r'queue="": 0 characters, expected 1 to 128'),
    ("q" * 129, {}, "22023", r"queue=.*129 characters, expected 1 to 128"),
    (None, {}, "22023", "the queue is missing"),
    ("q", {"task": "t" * 256}, "22023", "task=.*256 characters, expected 1 to 255"),
    ("q", {"task": 5}, "22023", "task=5: expected a text"),
    ("q", {"fingerprint": ""}, "22023", "fingerprint=.*expected 1 to 255"),
    ("q", {"fingerprint": "f" * 256}, "22023", "fingerprint=.*expected 1 to 255"),
    ("q", {"unique": "yes"}, "22023", 'unique="yes": expected true or false'),
    ("q", {"priority": 101}, "22023", "priority=101: expected -100 to 100"),
    ("q", {"priority": 1.5}, "22023", "priority=1.5: expected a whole number"),
    ("q", {"priority": "5"}, "22023", 'priority="5": expected a whole number'),
    ("q", {"priority": True}, "22023", "priority=true: expected a whole number"),
    ("q", {"max_retries": -1}, "22023", "max_retries=-1: expected 0"),
    ("q", {"max_retries": 2**31}, "22023", "max_retries=2147483648: expected 0"),
    ("q", {"run_after": -1}, "22023", "run_after=-1: a delay is not negative"),
    ("q", {"deadline": "-1 hour"}, "22023", "a delay is not negative"),
    ("q", {"run_after": "36526 days"}, "22023", "at most 36525 days"),
    ("q", {"run_after": "2030-01-01T00:00:00"}, "22007", "expected a time or a delay"),
    ("q", {"run_after": "2030-01-01"}, "22007", "expected a time or a delay"),
    ("q", {"run_after": "2030-13-01T00:00:00Z"}, "22007", "expected a time or a delay"),
    ("q", {"deadline": "tomorrow"}, "22007", "expected a time or a delay"),
    ("q", {"deadline": True}, "22007", "expected a time or a delay"),
    ("q", {"deadline": 1e300}, "22007", "expected a time or a delay"),
    ("q", {"deadline": "10000-01-01T00:00:00Z"}, "22008", "before the year 1 or after 9999"),
    ("q", {"colour": "red"}, "22023", 'there is no option "colour"'),
    ("q", {"queue": "other"}, "22023", 'no "queue" and no "payload"'),
    ("q", {"payload": {}}, "22023", 'no "queue" and no "payload"'),
]


@pytest.mark.parametrize(("queue", "options", "state", "sentence"), REFUSED)
def test_what_cannot_be_is_an_error_with_a_sentence_and_a_state(connection, queue, options, state, sentence):
    with pytest.raises(psycopg.Error, match=sentence) as refusal:
        call(connection, queue, **options)
    assert refusal.value.sqlstate == state
    assert connection.execute("SELECT count(*) FROM neoq_jobs").fetchone() == (0,)


@pytest.mark.parametrize(
    ("jobs", "sentence"),
    [
        ({}, "jobs: expected a JSON array of objects, got object"),
        (None, "jobs: expected a JSON array of objects, got null"),
        ([{"queue": "q"}, 5], r"jobs\[1\]: expected an object, got number"),
        ([{"queue": "q"}, {}], r"jobs\[1\]: the queue is missing"),
        ([{"queue": "q"}, {"queue": "q", "priority": 500}], r"jobs\[1\]: priority=500"),
    ],
)
def test_one_job_that_cannot_be_is_named_and_keeps_out_all(connection, jobs, sentence):
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=sentence):
        call_many(connection, jobs)
    assert connection.execute("SELECT count(*) FROM neoq_jobs").fetchone() == (0,)


def test_a_payload_has_the_limits_that_it_has_in_python(connection):
    def nested(levels):
        return "[" * levels + "]" * levels

    assert call(connection, "q", "x" * (MIB - 2))
    assert connection.execute("SELECT neoq_enqueue('q', %s::jsonb)", [nested(100)]).fetchone()
    assert connection.execute("SELECT neoq_enqueue('q', %s::jsonb)", [f"[{nested(99)}, 5]"]).fetchone()
    for payload, sentence in (
        (json.dumps("x" * (MIB - 1)), "1048577 bytes of JSON, the most are 1048576"),
        (nested(101), "nested over 100 levels"),
        (nested(100).replace("[]", '[{"a": {}}]'), "nested over 100 levels"),
    ):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=sentence):
            connection.execute("SELECT neoq_enqueue('q', %s::jsonb)", [payload])
    for number in ("9" * 4300, "-" + "9" * 4299, "1e4299", "0." + "9" * 5000):
        (id_,) = connection.execute("SELECT neoq_enqueue('q', %s::jsonb)", [f'{{"n": {number}}}']).fetchone()
        assert decode(connection.execute("SELECT payload::text FROM neoq_jobs WHERE id = %s", [id_]).fetchone()[0])
    for number in ("9" * 4301, "-" + "9" * 4300, "1e4300"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="a number of over 4300 characters"):
            connection.execute("SELECT neoq_enqueue('q', %s::jsonb)", [f'[{{"n": {number}}}]'])
    with pytest.raises(psycopg.errors.UntranslatableCharacter):
        connection.execute("""SELECT neoq_enqueue('q', '{"a": "\\u0000"}')""")


PAYLOADS = [
    {},
    {"user_id": 5, "name": "ü 🚀", "a": [1, 2.5, None, True], "Zz": {"b": 1, "aa": 2}},
    [1.0, 1, 1e-7, -0.0, 1e16, 10**30, '\\ " \n \x7f \x1f'],
    None,
    "text",
]


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
@pytest.mark.parametrize("task", [None, "myapp.tasks:send", 'ü"\\'])
def test_unique_means_in_sql_what_it_means_in_python(connection, engine, task, payload):
    with Session(engine) as session, session.begin():
        (there,) = enqueue_many(session, [NewJob.of("q", payload, task=task, unique=True)])
    query = """
        SELECT * FROM neoq_enqueue_many(jsonb_build_array(
            jsonb_build_object('queue', %s::text, 'task', %s::text, 'payload', %s::jsonb, 'unique', true)))
    """
    assert connection.execute(query, ["q", task, encode(payload)]).fetchone() == (there.id, False)
    assert connection.execute(query, ["other", task, encode(payload)]).fetchone()[1]
    with Session(engine) as session, session.begin():
        (again,) = enqueue_many(session, [NewJob.of("other", payload, task=task, unique=True)])
        assert not again.created


def test_a_key_of_one_s_own_goes_before_unique(connection):
    first = call(connection, "q", {"n": 1}, unique=True, fingerprint="key")
    assert call(connection, "q", {"n": 2}, unique=True, fingerprint="key") == first
    assert call(connection, "q", {"n": 1}, unique=True) != first


def test_results_stand_in_the_order_of_ten_thousand_jobs(connection):
    jobs = [
        {"queue": "q", "payload": {"n": n}, "fingerprint": f"key {n % 1_000}" if n % 3 == 0 else None}
        for n in range(10_000)
    ]
    results = call_many(connection, jobs)
    rows = dict(connection.execute("SELECT id, (payload -> 'n')::int FROM neoq_jobs").fetchall())
    first_with = {}
    for n, ((id_, created), job) in enumerate(zip(results, jobs, strict=True)):
        key = job["fingerprint"]
        first = n if key is None else first_with.setdefault(key, n)
        assert created == (first == n)
        assert rows[id_] == first
    assert len(rows) == sum(created for _, created in results)
    assert list(rows.values()) == [rows[id_] for id_ in rows]
    assert call_many(connection, []) == []


@pytest.mark.parametrize("status", ["new", "running", "failed", "processed", "cancelled"])
def test_only_an_unfinished_job_is_in_the_way_of_its_like(connection, status):
    first = call(connection, "q", unique=True)
    connection.execute(
        "UPDATE neoq_jobs SET status = %(s)s, claim_token = CASE WHEN %(s)s = 'running' THEN 1 END,"
        " finished_at = CASE WHEN %(s)s IN ('processed', 'cancelled') THEN now() END",
        {"s": status},
    )
    assert (call(connection, "q", unique=True) == first) == (status in {"new", "running", "failed"})


@pytest.mark.parametrize("ended", ["commit", "rollback"])
def test_two_who_enqueue_the_same_at_once_make_one_job(connection, database_url, ended):
    results = []

    def second():
        with psycopg.connect(libpq(make_url(database_url))) as other:
            results.extend(call_many(other, [{"queue": "q", "unique": True}]))

    with closing(psycopg.connect(libpq(make_url(database_url)))) as first:
        mine = call(first, "q", unique=True)
        thread = threading.Thread(target=second)
        thread.start()
        waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        eventually(lambda: connection.execute(waits).fetchone() == (1,))
        getattr(first, ended)()
    thread.join(20)
    ((id_, created),) = results
    assert created == (ended == "rollback")
    assert (id_ == mine) == (ended == "commit")


def test_a_commit_wakes_a_runner_and_a_rollback_does_not(connection, engine):
    with ears(engine.url, "q") as listening:
        connection.execute("BEGIN")
        call(connection, "q")
        assert listening.heard() == []
        connection.execute("ROLLBACK")
        assert listening.heard() == []
        call(connection, "q")
        assert listening.heard() == ["q"]


# Rights and schemas --------------------------------------------------------------------------------------------------


@pytest.fixture
def role(connection, database_url):
    """A role that may do nothing."""
    name = f"neoq_test_role_{make_url(database_url).database[-12:]}"
    connection.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)))
    yield name
    connection.execute("RESET ROLE")
    connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
    connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def become(connection, role):
    connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))


def test_nobody_may_call_them_who_was_not_told(connection, role, neoq_schema):
    if neoq_schema:
        connection.execute(sql.SQL("GRANT USAGE ON SCHEMA {} TO PUBLIC").format(sql.Identifier(neoq_schema)))
    become(connection, role)
    for query in ("SELECT neoq_enqueue('q')", "SELECT neoq_enqueue_many('[]')"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for function"):
            connection.execute(query)


def test_nor_may_those_whom_default_privileges_let_call_every_new_function(fresh_database):
    engine = create_engine(fresh_database(), poolclass=NullPool)
    with engine.connect() as connection:
        for statement in (
            "CREATE ROLE \"neoq test 'api'\"",
            "ALTER DEFAULT PRIVILEGES GRANT ALL ON FUNCTIONS TO \"neoq test 'api'\", PUBLIC",
        ):
            connection.exec_driver_sql(statement)
        migrations.upgrade(connection)
        acl = "SELECT DISTINCT a.grantee = proowner FROM pg_proc, aclexplode(proacl) AS a WHERE proname ~ '^neoq_enq'"
        assert connection.exec_driver_sql(acl).all() == [(True,)]
        connection.rollback()


def test_the_right_to_call_is_all_that_a_producer_needs(connection, role, neoq_schema):
    if neoq_schema:
        connection.execute(sql.SQL("GRANT USAGE ON SCHEMA {} TO PUBLIC").format(sql.Identifier(neoq_schema)))
    grant = "GRANT EXECUTE ON FUNCTION neoq_enqueue(text, jsonb, jsonb), neoq_enqueue_many(jsonb) TO {}"
    connection.execute(sql.SQL(grant).format(sql.Identifier(role)))
    become(connection, role)
    first = call(connection, "q", {"n": 1}, unique=True)
    assert call_many(connection, [{"queue": "q", "payload": {"n": 1}, "unique": True}]) == [(first, False)]
    for query in ("SELECT * FROM neoq_jobs", "INSERT INTO neoq_jobs (queue) VALUES ('q')"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(query)


@pytest.mark.parametrize("producer_only", [True, False])
def test_who_may_enqueue_in_python_may_in_sql(connection, role, neoq_schema, producer_only):
    for statement in grants(role, schema=neoq_schema, producer_only=producer_only):
        connection.execute(statement)
    become(connection, role)
    assert call(connection, "q")


def test_the_caller_s_search_path_and_objects_do_not_matter(schema_engine):
    schema = sql.Identifier(schema_engine.get_execution_options()["neoq_schema"])
    with closing(psycopg.connect(libpq(schema_engine.url), autocommit=True)) as connection:
        # Tables and functions with the names that the function uses, first on every path.
        connection.execute("CREATE TEMP TABLE neoq_jobs (id bigint, queue text)")
        connection.execute(
            "CREATE FUNCTION pg_temp.now() RETURNS timestamptz LANGUAGE plpgsql AS 'BEGIN RETURN 1 / 0; END'"
        )
        connection.execute("CREATE SCHEMA tenant; CREATE TABLE tenant.neoq_jobs (id bigint, queue text)")
        connection.execute("SET search_path = pg_temp, tenant, pg_catalog")
        (id_,) = connection.execute(sql.SQL("SELECT {}.neoq_enqueue('q')").format(schema)).fetchone()
        found = connection.execute(sql.SQL("SELECT id, queue FROM {}.neoq_jobs").format(schema)).fetchall()
        assert found == [(id_, "q")]


def test_each_schema_s_functions_fill_its_own_tables(fresh_database):
    engine = create_engine(fresh_database(), poolclass=NullPool)
    # Names that the functions use for something else.
    schemas = ["j", "m", "job", "the 'other' \"one\" $1 <schema>", "$enqueue$ $neoq$ $neoq_$ $table$", "\\s"]
    with engine.begin() as connection:
        for schema in schemas:
            connection.exec_driver_sql(f"CREATE SCHEMA {quoted(schema)}", execution_options={"no_parameters": True})
            migrations.upgrade(connection, schema=schema)
            assert migrations.check(connection, schema=schema) == []
        for schema in schemas:
            for _ in range(2):
                ask = f"SELECT {quoted(schema)}.neoq_enqueue('q', '{{}}', '{{\"unique\": true}}')"
                assert connection.exec_driver_sql(ask, execution_options={"no_parameters": True}).scalar() == 1


def quoted(name):
    return '"' + name.replace('"', '""') + '"'


def test_a_changed_function_is_found(fresh_database):
    engine = create_engine(fresh_database(), poolclass=NullPool)
    with engine.begin() as connection:
        migrations.upgrade(connection)
        connection.exec_driver_sql("ALTER FUNCTION neoq_enqueue(text, jsonb, jsonb) SECURITY INVOKER")
        connection.exec_driver_sql("DROP FUNCTION neoq_enqueue_many(jsonb)")
        changed, missing = migrations.check(connection)
    assert changed.startswith("function neoq_enqueue(queue text, payload jsonb, options jsonb) is ... ")
    assert "and should be ... SECURITY DEFINER SET search_path" in changed
    assert len(changed) < 1_000
    assert missing.startswith("function neoq_enqueue_many(jobs jsonb) is missing")


# Other languages -----------------------------------------------------------------------------------------------------

TRIGGER = """
CREATE TABLE host_orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text NOT NULL);
CREATE FUNCTION host_receipt() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM neoq_enqueue('emails', jsonb_build_object('order_id', NEW.id),
        '{"task": "myapp.tasks:send_receipt", "unique": true}');
    RETURN NULL;
END $$;
CREATE TRIGGER host_receipt AFTER INSERT ON host_orders FOR EACH ROW EXECUTE FUNCTION host_receipt();
BEGIN; INSERT INTO host_orders (customer) VALUES ('Ada'), ('Grace'); COMMIT;
BEGIN; INSERT INTO host_orders (customer) VALUES ('nobody'); ROLLBACK;
SELECT neoq_enqueue('greetings', '{"message": "hello"}');
"""


def test_psql_and_a_trigger_of_the_host_s(migrated_database):
    url = migrated_database()
    done = psql(url, TRIGGER)
    assert done.returncode == 0, done.stderr
    with closing(psycopg.connect(libpq(make_url(url)))) as connection:
        query = "SELECT queue, task, payload, fingerprint IS NOT NULL FROM neoq_jobs ORDER BY id"
        assert connection.execute(query).fetchall() == [
            ("emails", "myapp.tasks:send_receipt", {"order_id": 1}, True),
            ("emails", "myapp.tasks:send_receipt", {"order_id": 2}, True),
            ("greetings", None, {"message": "hello"}, False),
        ]


NODE = """
const { Client } = require("pg");
(async () => {
  const client = new Client(JSON.parse(process.argv[2]));
  await client.connect();
  const ask = async (text, values) => (await client.query(text, values)).rows;
  const one = "SELECT neoq_enqueue($1, $2, $3) AS id";
  const result = {};
  await client.query("BEGIN");
  await ask(one, ["q", { n: 0 }, {}]);
  await client.query("ROLLBACK");
  await client.query("BEGIN");
  const options = { task: "m:f", unique: true, run_after: 60 };
  [result.one] = await ask(one, ["q", { user_id: 5, text: "ü 🚀 '\\\\" }, options]);
  result.many = await ask("SELECT id, created FROM neoq_enqueue_many($1)", [JSON.stringify([
    { queue: "q", task: "m:f", payload: { text: "ü 🚀 '\\\\", user_id: 5 }, unique: true },
    { queue: "q", deadline: new Date(Date.UTC(2030, 0, 31)) },
  ])]);
  await client.query("COMMIT");
  try { await ask(one, ["q", {}, { colour: "red" }]); } catch (error) { result.error = [error.code, error.message]; }
  await client.end();
  console.log(JSON.stringify(result));
})().catch((error) => { console.error(error); process.exit(1); });
"""


@pytest.fixture(scope="session")
def node(tmp_path_factory):
    """A directory in which Node finds the driver ``pg``."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("this machine has no Node.js")
    directory = tmp_path_factory.mktemp("node")
    install = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "pg@8"]
    done = subprocess.run(install, cwd=directory, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install pg: {done.stderr.strip()[-200:]}")
    (directory / "call.js").write_text(NODE)
    return directory


def test_node(node, connection, engine):
    url = engine.url
    where = {"host": connection.info.host, "port": connection.info.port, "user": connection.info.user}
    where |= {"database": url.database, "password": url.password}
    done = subprocess.run(["node", "call.js", json.dumps(where)], cwd=node, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    id_ = int(result["one"]["id"])
    assert [(int(made["id"]) == id_, made["created"]) for made in result["many"]] == [(True, False), (False, True)]
    assert result["error"] == ["22023", 'jobs[0]: there is no option "colour"']
    job = row(connection, id_)
    assert (job.task, job.payload) == ("m:f", {"user_id": 5, "text": "ü 🚀 '\\"})
    assert row(connection, int(result["many"][1]["id"])).deadline == datetime(2030, 1, 31, tzinfo=UTC)
    assert connection.execute("SELECT count(*) FROM neoq_jobs").fetchone() == (2,)
    with Session(engine) as session, session.begin():
        payload = {"text": "ü 🚀 '\\", "user_id": 5}
        assert enqueue(session, "q", payload, task="m:f", unique=True) == (id_, False)

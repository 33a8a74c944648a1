"""The functions by which SQL enqueues with the checks of the Python call: neoq_enqueue and neoq_enqueue_many.

They run with their owner's rights, so a role needs no right but to call them. Two things keep that safe. Every name in
them is qualified: the server writes the schema of the jobs table into the text when it creates them, for the
search_path may be another one at each call. And their own search_path is ``pg_catalog`` alone.

No literal in them has a backslash: what that means is up to the caller's ``standard_conforming_strings``.
"""

from __future__ import annotations

from typing import Final

from sqla_neoq.migrations.quoting import literal

SIGNATURES: Final = ("neoq_enqueue(text, jsonb, jsonb)", "neoq_enqueue_many(jsonb)")

# "<schema>" stands for the quoted name of the schema; "$enqueue$" cuts the body out.
_ENQUEUE_MANY: Final = """
CREATE FUNCTION <schema>.neoq_enqueue_many(jobs jsonb) RETURNS TABLE (id bigint, created boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $enqueue$
DECLARE
    given jsonb;
    place bigint;
    label text;
    key text;
    value jsonb;
    content text;
    longest integer;
    size integer;
    moment timestamp with time zone;
    delay interval;
    job <schema>.neoq_jobs;
    made <schema>.neoq_jobs[] := '{}';
    ids bigint[];
    results bigint[];
    fresh boolean[];
    pending integer;
    sequence regclass := pg_get_serial_sequence(pg_typeof(job)::text, 'id');
BEGIN
    IF jsonb_typeof(jobs) IS DISTINCT FROM 'array' THEN
        RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'jobs: expected a JSON array of objects, got '
            || coalesce(jsonb_typeof(jobs), 'NULL');
    END IF;
    FOR given, place IN SELECT e.value, e.ordinality FROM jsonb_array_elements(jobs) WITH ORDINALITY AS e LOOP
        label := 'jobs[' || place - 1 || ']';
        IF jsonb_typeof(given) <> 'object' THEN
            RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = label || ': expected an object, got '
                || jsonb_typeof(given);
        END IF;
        job := NULL;
        job.priority := 0;
        job.payload := coalesce(given -> 'payload', '{}');
        job.run_after := now();
        FOR key, value IN SELECT o.key, o.value FROM jsonb_each(given - 'payload') AS o LOOP
            IF key NOT IN ('queue', 'task', 'fingerprint', 'unique', 'priority', 'max_retries', 'run_after', 'deadline')
            THEN
                RAISE EXCEPTION USING ERRCODE = '22023',
                    MESSAGE = format('%s: there is no option %s', label, to_json(key)),
                    HINT = 'Options are task, run_after, priority, deadline, max_retries, unique and fingerprint.';
            END IF;
            CONTINUE WHEN jsonb_typeof(value) = 'null';
            content := value #>> '{}';
            CASE
            WHEN key IN ('queue', 'task', 'fingerprint') THEN
                IF jsonb_typeof(value) <> 'string' THEN
                    RAISE EXCEPTION USING ERRCODE = '22023',
                        MESSAGE = format('%s: %s=%s: expected a text', label, key, left(value::text, 80));
                END IF;
                longest := CASE key WHEN 'queue' THEN 128 ELSE 255 END;
                IF length(content) NOT BETWEEN 1 AND longest THEN
                    RAISE EXCEPTION USING ERRCODE = '22023',
                        MESSAGE = format('%s: %s=%s: %s characters, expected 1 to %s', label, key,
                            left(value::text, 80), length(content), longest);
                END IF;
                CASE key
                WHEN 'queue' THEN job.queue := content;
                WHEN 'task' THEN job.task := content;
                ELSE job.fingerprint := content;
                END CASE;
            WHEN key = 'unique' THEN
                IF jsonb_typeof(value) <> 'boolean' THEN
                    RAISE EXCEPTION USING ERRCODE = '22023',
                        MESSAGE = format('%s: unique=%s: expected true or false', label, left(value::text, 80)),
                        HINT = 'A key of your own goes into fingerprint.';
                END IF;
            WHEN key IN ('priority', 'max_retries') THEN
                IF jsonb_typeof(value) <> 'number' OR content !~ '^-?[0-9]+$' THEN
                    RAISE EXCEPTION USING ERRCODE = '22023',
                        MESSAGE = format('%s: %s=%s: expected a whole number', label, key, left(value::text, 80));
                ELSIF key = 'priority' AND content::numeric NOT BETWEEN -100 AND 100 THEN
                    RAISE EXCEPTION USING ERRCODE = '22023',
                        MESSAGE = format('%s: priority=%s: expected -100 to 100; higher runs first', label,
                            left(content, 80));
                ELSIF key = 'max_retries' AND content::numeric NOT BETWEEN 0 AND 2147483647 THEN
                    RAISE EXCEPTION USING ERRCODE = '22023',
                        MESSAGE = format('%s: max_retries=%s: expected 0 (one attempt) to 2147483647', label,
                            left(content, 80));
                END IF;
                IF key = 'priority' THEN
                    job.priority := content::smallint;
                ELSE
                    job.max_retries := content::integer;
                END IF;
            ELSE
                -- A time with its zone, or a number of seconds or an interval from the database's now.
                BEGIN
                    IF jsonb_typeof(value) = 'number' THEN
                        delay := make_interval(secs => content::double precision);
                    ELSIF jsonb_typeof(value) <> 'string' OR content ~ '^ *[0-9]{4,}-[0-9]{2}-[0-9]{2}'
                        AND content !~* ':[0-9]{2}([.][0-9]+)? *(Z|UTC|[-+][0-9]{2}(:?[0-9]{2})?) *$'
                    THEN
                        RAISE invalid_datetime_format;
                    ELSIF content ~ '^ *[0-9]{4,}-[0-9]{2}-[0-9]{2}' THEN
                        delay := NULL;
                        moment := content::timestamp with time zone;
                    ELSE
                        delay := content::interval;
                    END IF;
                    IF delay IS NOT NULL THEN
                        moment := statement_timestamp() + delay;
                    END IF;
                EXCEPTION WHEN data_exception THEN
                    RAISE EXCEPTION USING ERRCODE = '22007',
                        MESSAGE = format('%s: %s=%s: expected a time or a delay', label, key, left(value::text, 80)),
                        HINT = 'Write a time with its zone, "2030-01-31T12:00:00Z", or a number of seconds or an '
                            'interval from now, 3600 or "1 hour".';
                END;
                IF delay < interval '0' OR delay > interval '36525 days' THEN
                    RAISE EXCEPTION USING ERRCODE = '22023',
                        MESSAGE = format('%s: %s=%s: a delay is not negative, and at most 36525 days', label, key,
                            left(value::text, 80));
                ELSIF NOT (moment >= '0001-01-01 UTC' AND moment < '10000-01-01 UTC') THEN
                    RAISE EXCEPTION USING ERRCODE = '22008',
                        MESSAGE = format('%s: %s=%s: before the year 1 or after 9999', label, key,
                            left(value::text, 80));
                END IF;
                IF key = 'run_after' THEN
                    job.run_after := moment;
                ELSE
                    job.deadline := moment;
                END IF;
            END CASE;
        END LOOP;
        size := octet_length(job.payload::text);
        IF job.queue IS NULL THEN
            RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = label || ': the queue is missing';
        ELSIF size > 1048576 THEN
            RAISE EXCEPTION USING ERRCODE = '22023',
                MESSAGE = format('%s: payload: %s bytes of JSON, the most are 1048576', label, size),
                HINT = 'Keep large data in a table of its own and pass its key.';
        ELSIF size > 4300 AND job.payload
            @? 'strict $.** ? (@.type() == "number" && (@ >= 1e4300 || @ <= -1e4299))'
        THEN
            RAISE EXCEPTION USING ERRCODE = '22023',
                MESSAGE = label || ': payload: a number of over 4300 characters, and Python reads no more',
                HINT = 'Pass it as a text.';
        ELSIF job.payload @? 'strict $.**{100} ? (@.type() == "array" || @.type() == "object")' THEN
            RAISE EXCEPTION USING ERRCODE = '22023',
                MESSAGE = label || ': payload: nested over 100 levels deep', HINT = 'Pass it flatter.';
        END IF;
        IF job.fingerprint IS NULL AND given -> 'unique' = 'true' THEN
            job.fingerprint := encode(
                sha256(convert_to(jsonb_build_array(job.task, job.payload)::text, 'UTF8')), 'hex');
        END IF;
        -- Numbered in the order of the jobs, whatever order they are inserted in.
        job.id := nextval(sequence);
        made := array_append(made, job);
    END LOOP;
    results := array_fill(CAST(NULL AS bigint), ARRAY[cardinality(made)]);
    fresh := array_fill(true, ARRAY[cardinality(made)]);
    FOR round IN 1 .. 100 LOOP
        -- Those with a fingerprint last, and in one order everywhere: two callers with the same keys in opposite orders
        -- would wait for each other in a deadlock.
        WITH added AS (
            INSERT INTO <schema>.neoq_jobs AS j
                (id, queue, task, priority, payload, fingerprint, run_after, deadline, max_retries)
            SELECT m.id, m.queue, m.task, m.priority, m.payload, m.fingerprint, m.run_after, m.deadline, m.max_retries
            FROM unnest(made) WITH ORDINALITY AS m
            WHERE results[m.ordinality] IS NULL
            ORDER BY m.fingerprint IS NOT NULL, CASE WHEN m.fingerprint IS NOT NULL THEN m.queue COLLATE "C" END,
                m.fingerprint COLLATE "C", m.ordinality
            ON CONFLICT (queue, fingerprint) WHERE fingerprint IS NOT NULL AND status IN ('new', 'running', 'failed')
            DO NOTHING
            RETURNING j.id
        )
        SELECT array_agg(added.id) INTO ids FROM added;
        WITH known AS MATERIALIZED (SELECT unnest(ids) AS id),
        theirs AS (
            SELECT m.ordinality, coalesce(known.id, j.id) AS id, known.id IS NOT NULL AS inserted
            FROM unnest(made) WITH ORDINALITY AS m
            LEFT JOIN known ON known.id = m.id
            LEFT JOIN <schema>.neoq_jobs AS j ON known.id IS NULL AND results[m.ordinality] IS NULL
                AND j.queue = m.queue AND j.fingerprint = m.fingerprint AND j.status IN ('new', 'running', 'failed')
        )
        SELECT array_agg(coalesce(results[t.ordinality], t.id) ORDER BY t.ordinality),
            array_agg(CASE WHEN results[t.ordinality] IS NULL THEN t.inserted ELSE fresh[t.ordinality] END
                ORDER BY t.ordinality),
            count(*) FILTER (WHERE coalesce(results[t.ordinality], t.id) IS NULL)
        INTO results, fresh, pending FROM theirs AS t;
        IF pending = 0 THEN
            RETURN QUERY SELECT r.id, r.inserted FROM unnest(results, fresh) WITH ORDINALITY AS r (id, inserted, place)
                ORDER BY r.place;
            RETURN;
        END IF;
    END LOOP;
    -- A duplicate may finish between the INSERT that met it and the look for it; a hundred times is no coincidence.
    RAISE EXCEPTION USING ERRCODE = '40001', MESSAGE = 'a duplicate came and went 100 times during one enqueue';
END
$enqueue$"""

_ENQUEUE: Final = """
CREATE FUNCTION <schema>.neoq_enqueue(queue text, payload jsonb DEFAULT '{}', options jsonb DEFAULT '{}') RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $enqueue$
BEGIN
    options := coalesce(options, '{}');
    IF jsonb_typeof(options) <> 'object' OR options ?| ARRAY['queue', 'payload'] THEN
        RAISE EXCEPTION USING ERRCODE = '22023',
            MESSAGE = 'options: expected an object, with no "queue" and no "payload" in it';
    END IF;
    RETURN (SELECT many.id FROM <schema>.neoq_enqueue_many(jsonb_build_array(
        options || jsonb_build_object('queue', queue, 'payload', coalesce(payload, '{}')))) AS many);
END
$enqueue$"""


def create(prefix: str) -> list[str]:
    """Return the statements that create the functions; ``prefix`` is ``"schema".`` or nothing."""
    return [
        *(_in_the_schema_of_the_tables(prefix, function) for function in (_ENQUEUE_MANY, _ENQUEUE)),
        *(_for_the_owner_alone(f"{prefix}{signature}") for signature in SIGNATURES),
    ]


def drop(prefix: str) -> list[str]:
    """Return the statements that remove the functions, as far as they are there."""
    return [f"DROP FUNCTION IF EXISTS {prefix}{signature}" for signature in SIGNATURES]


def _for_the_owner_alone(function: str) -> str:
    # PostgreSQL lets everybody call a new function, and a hosted one, by its default privileges, the roles of the
    # public API. These write jobs with their owner's rights, and a job is code that runs.
    do = f"""
DECLARE
    who oid;
BEGIN
    FOR who IN SELECT DISTINCT a.grantee
        FROM pg_catalog.pg_proc AS p,
            pg_catalog.aclexplode(coalesce(p.proacl, pg_catalog.acldefault('f', p.proowner))) AS a
        WHERE p.oid = CAST(CAST({literal(function)} AS regprocedure) AS oid) AND a.grantee <> p.proowner
    LOOP
        EXECUTE {literal(f"REVOKE ALL ON FUNCTION {function} FROM ")} || CASE who WHEN 0 THEN 'PUBLIC'
            ELSE pg_catalog.quote_ident(CAST(pg_catalog.pg_get_userbyid(who) AS text)) END;
    END LOOP;
END
"""
    return f"DO {literal(do)}"


def _in_the_schema_of_the_tables(prefix: str, function: str) -> str:
    head, body, _ = function.strip().split("$enqueue$")
    # With casts, for a function of the host's that fits the types better would go before the server's own.
    do = f"""
DECLARE
    there text := (
        SELECT pg_catalog.quote_ident(CAST(n.nspname AS text))
        FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
        WHERE c.oid = CAST(CAST({literal(prefix + "neoq_jobs")} AS regclass) AS oid));
BEGIN
    EXECUTE {_filled_in(head)} || pg_catalog.quote_literal({_filled_in(body)});
END
"""
    return f"DO {literal(do)}"


def _filled_in(text: str) -> str:
    """Write the expression that is the text with the schema in it."""
    # Not the server's replace(): the schema's name may hold whatever stands for it.
    return " || there || ".join(literal(part) for part in text.split("<schema>"))

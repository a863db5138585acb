"""What a session is in PostgreSQL: tables, the functions that every write is one call of, and their migrations.

One row per session holds identity, lease and head; beside it lie rows that are written once. Whoever writes anything of
a session holds its row until the commit, so acquisitions, commits, journal rows and inbox rows of one session come one
after the other, and a stale epoch is seen by every write that follows. Nothing is ever held while a client thinks: a
write is one statement.

All that callers name or write is `bytea`: PostgreSQL's text has no NUL, and depends on the database's encoding.
`convert_from(id, 'UTF8')` shows it.
"""

from __future__ import annotations

from typing import Final

from stepwell._postgres import Part
from stepwell.errors import StoreBusyError, StoreDataError, StoreError

__all__ = ["HELD", "OK", "PART", "STALE", "TAKEN", "closed"]

OK, HELD, STALE = "ok", "held", "stale"
"""What came of a call; a save whose revision moved is `ok` with another revision than the next."""

TAKEN: Final = "SW001"
"""SQLSTATE of a commit that uses a message position twice; the message is the row's place in the commit, from 1."""

# A lease's columns and the head share a row: a commit, an acquisition and a renewal are one update each, in place while
# the page has room, because no index knows a column that they change in the middle of a turn. (A large head is not
# copied when only the lease changes: PostgreSQL keeps it apart.)
_TABLES: Final = """
CREATE TABLE stepwell_session (
    key bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id bytea NOT NULL UNIQUE,
    incarnation bigint NOT NULL,
    epoch bigint NOT NULL,
    owner bytea,
    expires double precision,
    turn smallint NOT NULL,
    wake double precision,
    revision bigint NOT NULL,
    flow bytea NOT NULL,
    status smallint NOT NULL,
    stage bytea NOT NULL,
    created double precision NOT NULL,
    saved double precision NOT NULL,
    head bytea NOT NULL
) WITH (fillfactor = 50);
-- Holds only what may become due, so it is empty but for the sessions that are at work, or wait with an end.
CREATE INDEX stepwell_session_due ON stepwell_session (turn)
    WHERE turn = 1 OR turn = 2 AND (owner IS NOT NULL OR wake IS NOT NULL);

-- stream: 's' the sequence, 'l' the log, 'm' and a namespace its messages.
CREATE TABLE stepwell_session_line (
    session bigint NOT NULL,
    stream bytea NOT NULL,
    position bigint NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (session, stream, position)
);

-- Keys are the callers' and may be longer than an entry of an index: the index has their hash.
CREATE TABLE stepwell_session_inbox (
    session bigint NOT NULL,
    n bigint GENERATED ALWAYS AS IDENTITY,
    name bytea NOT NULL,
    kind smallint NOT NULL,
    state smallint NOT NULL,
    payload bytea NOT NULL,
    result bytea,
    PRIMARY KEY (session, n)
);
CREATE UNIQUE INDEX stepwell_session_inbox_name ON stepwell_session_inbox (session, sha256(name));
CREATE INDEX stepwell_session_inbox_open ON stepwell_session_inbox (session, n) WHERE state < 2;

CREATE TABLE stepwell_session_journal (
    session bigint NOT NULL,
    n bigint GENERATED ALWAYS AS IDENTITY,
    name bytea NOT NULL,
    state smallint NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (session, n)
);
CREATE UNIQUE INDEX stepwell_session_journal_name ON stepwell_session_journal (session, sha256(name));
"""

# `flush`: what must survive a crash of the server even where commits need not. An acquisition that is forgotten would
# be granted again, with the same epoch, while the first one's owner goes on; an intent that is forgotten would let its
# effect run twice.
_HELPERS: Final = """
CREATE FUNCTION stepwell_session_now_1(p_now double precision) RETURNS double precision LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(p_now, extract(epoch FROM clock_timestamp())::double precision)
$$;

CREATE FUNCTION stepwell_session_flush_1() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
END $$;

CREATE FUNCTION stepwell_session_journal_1(p_session bigint, p_name bytea, p_state bigint, p_data bytea)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO stepwell_session_journal (session, name, state, data) VALUES (p_session, p_name, p_state, p_data)
    ON CONFLICT (session, sha256(name)) DO UPDATE SET state = excluded.state, data = excluded.data
$$;

CREATE FUNCTION stepwell_session_rows_1(
    p_session bigint, m_stream bytea[], m_position bigint[], m_data bytea[], f_stream bytea[], f_first bigint[],
    s_data bytea[], l_data bytea[],
    i_name bytea[], i_kind bigint[], i_state bigint[], i_payload bytea[], i_result bytea[],
    j_clear bytea, j_name bytea[], j_state bigint[], j_data bytea[]
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v record;
BEGIN
    FOR v IN SELECT * FROM unnest(m_stream, m_position, m_data) WITH ORDINALITY AS u(stream, position, data, place)
        ORDER BY place LOOP
        INSERT INTO stepwell_session_line VALUES (p_session, v.stream, v.position, v.data) ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            RAISE EXCEPTION USING ERRCODE = 'SW001', MESSAGE = v.place::text;
        END IF;
    END LOOP;
    IF cardinality(f_stream) > 0 THEN
        DELETE FROM stepwell_session_line l USING unnest(f_stream, f_first) AS u(stream, first)
        WHERE l.session = p_session AND l.stream = u.stream AND l.position < u.first;
    END IF;
    IF cardinality(s_data) > 0 THEN
        INSERT INTO stepwell_session_line
        SELECT p_session, 's', place - 1 + (
            SELECT coalesce(max(position) + 1, 0) FROM stepwell_session_line WHERE session = p_session AND stream = 's'
        ), data
        FROM unnest(s_data) WITH ORDINALITY AS u(data, place);
    END IF;
    IF cardinality(l_data) > 0 THEN
        INSERT INTO stepwell_session_line
        SELECT p_session, 'l', place - 1 + (
            SELECT coalesce(max(position) + 1, 0) FROM stepwell_session_line WHERE session = p_session AND stream = 'l'
        ), data
        FROM unnest(l_data) WITH ORDINALITY AS u(data, place);
    END IF;
    -- A row without a kind changes one that is there.
    FOR v IN SELECT * FROM unnest(i_name, i_kind, i_state, i_payload, i_result) WITH ORDINALITY
        AS u(name, kind, state, payload, result, place) ORDER BY place LOOP
        IF v.kind IS NULL THEN
            UPDATE stepwell_session_inbox SET state = v.state, result = v.result
            WHERE session = p_session AND sha256(name) = sha256(v.name);
        ELSE
            INSERT INTO stepwell_session_inbox (session, name, kind, state, payload, result)
            VALUES (p_session, v.name, v.kind, v.state, v.payload, v.result) ON CONFLICT DO NOTHING;
        END IF;
    END LOOP;
    IF j_clear IS NOT NULL THEN
        DELETE FROM stepwell_session_journal
        WHERE session = p_session AND substring(name FOR octet_length(j_clear)) = j_clear;
    END IF;
    FOR v IN SELECT * FROM unnest(j_name, j_state, j_data) WITH ORDINALITY AS u(name, state, data, place)
        ORDER BY place LOOP
        PERFORM stepwell_session_journal_1(p_session, v.name, v.state, v.data);
    END LOOP;
END $$;
"""

_CALLS: Final = """
-- No row where the id is taken; else the lease, then the open rows of the inbox.
CREATE FUNCTION stepwell_session_create_1(
    p_now double precision, p_id bytea, p_incarnation bigint, p_owner bytea, p_ttl double precision,
    p_turn bigint, p_wake double precision, p_flow bytea, p_status bigint, p_stage bytea, p_created double precision,
    p_saved double precision, p_head bytea, p_release boolean,
    m_stream bytea[], m_position bigint[], m_data bytea[], f_stream bytea[], f_first bigint[],
    s_data bytea[], l_data bytea[],
    i_name bytea[], i_kind bigint[], i_state bigint[], i_payload bytea[], i_result bytea[],
    j_clear bytea, j_name bytea[], j_state bigint[], j_data bytea[]
) RETURNS TABLE (
    r_key bigint, r_expires double precision,
    r_name bytea, r_kind smallint, r_state smallint, r_payload bytea, r_result bytea
) LANGUAGE plpgsql AS $$
BEGIN
    r_expires := stepwell_session_now_1(p_now) + p_ttl;
    INSERT INTO stepwell_session (
        id, incarnation, epoch, owner, expires, turn, wake, revision, flow, status, stage, created, saved, head
    ) VALUES (
        p_id, p_incarnation, 1, CASE WHEN NOT p_release THEN p_owner END, CASE WHEN NOT p_release THEN r_expires END,
        p_turn, p_wake, 1, p_flow, p_status, p_stage, p_created, p_saved, p_head
    ) ON CONFLICT DO NOTHING RETURNING key INTO r_key;
    IF r_key IS NULL THEN
        RETURN;
    END IF;
    PERFORM stepwell_session_rows_1(
        r_key, m_stream, m_position, m_data, f_stream, f_first, s_data, l_data,
        i_name, i_kind, i_state, i_payload, i_result, j_clear, j_name, j_state, j_data);
    RETURN NEXT;
    RETURN QUERY SELECT r_key, r_expires, name, kind, state, payload, result
        FROM stepwell_session_inbox WHERE session = r_key AND state < 2 ORDER BY n;
END $$;

-- No row where there is no session; else the lease, the new one or the other owner's, then the open rows of the inbox.
CREATE FUNCTION stepwell_session_acquire_1(
    p_now double precision, p_id bytea, p_owner bytea, p_ttl double precision,
    p_known_revision bigint, p_known_key bigint, p_known_incarnation bigint, p_supersede bytea
) RETURNS TABLE (
    r_outcome text, r_key bigint, r_incarnation bigint, r_epoch bigint, r_owner bytea, r_expires double precision,
    r_revision bigint, r_head bytea,
    r_name bytea, r_kind smallint, r_state smallint, r_payload bytea, r_result bytea
) LANGUAGE plpgsql AS $$
DECLARE
    v_now double precision;
BEGIN
    -- The lock first: what is read after it, the time included, is what the last writer left.
    SELECT key, incarnation, epoch, owner, expires, revision
    INTO r_key, r_incarnation, r_epoch, r_owner, r_expires, r_revision
    FROM stepwell_session WHERE id = p_id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    v_now := stepwell_session_now_1(p_now);
    IF r_owner IS NOT NULL AND r_owner <> p_owner AND r_owner IS DISTINCT FROM p_supersede AND r_expires > v_now THEN
        r_outcome := 'held';
        RETURN NEXT;
        RETURN;
    END IF;
    PERFORM stepwell_session_flush_1();
    UPDATE stepwell_session SET epoch = epoch + 1, owner = p_owner, expires = v_now + p_ttl WHERE key = r_key
    RETURNING epoch, owner, expires INTO r_epoch, r_owner, r_expires;
    IF r_revision IS DISTINCT FROM p_known_revision OR r_key IS DISTINCT FROM p_known_key
        OR r_incarnation IS DISTINCT FROM p_known_incarnation THEN
        SELECT head INTO r_head FROM stepwell_session WHERE key = r_key;
    END IF;
    r_outcome := 'ok';
    RETURN NEXT;
    r_head := NULL;
    RETURN QUERY SELECT r_outcome, r_key, r_incarnation, r_epoch, r_owner, r_expires, r_revision, r_head,
        name, kind, state, payload, result
        FROM stepwell_session_inbox WHERE session = r_key AND state < 2 ORDER BY n;
END $$;

-- The new revision, or the one that is there where another was expected; null where the lease is not current.
CREATE FUNCTION stepwell_session_save_1(
    p_id bytea, p_key bigint, p_incarnation bigint, p_epoch bigint, p_owner bytea, p_revision bigint,
    p_turn bigint, p_wake double precision, p_flow bytea, p_status bigint, p_stage bytea, p_created double precision,
    p_saved double precision, p_head bytea, p_release boolean,
    m_stream bytea[], m_position bigint[], m_data bytea[], f_stream bytea[], f_first bigint[],
    s_data bytea[], l_data bytea[],
    i_name bytea[], i_kind bigint[], i_state bigint[], i_payload bytea[], i_result bytea[],
    j_clear bytea, j_name bytea[], j_state bigint[], j_data bytea[]
) RETURNS TABLE (r_saved boolean, r_revision bigint) LANGUAGE plpgsql AS $$
BEGIN
    UPDATE stepwell_session SET
        revision = revision + 1, turn = p_turn, wake = p_wake, flow = p_flow, status = p_status, stage = p_stage,
        created = p_created, saved = p_saved, head = p_head,
        owner = CASE WHEN NOT p_release THEN owner END, expires = CASE WHEN NOT p_release THEN expires END
    WHERE key = p_key AND id = p_id AND incarnation = p_incarnation AND epoch = p_epoch AND owner = p_owner
        AND revision = p_revision
    RETURNING revision INTO r_revision;
    r_saved := FOUND;
    IF r_saved THEN
        PERFORM stepwell_session_rows_1(
            p_key, m_stream, m_position, m_data, f_stream, f_first, s_data, l_data,
            i_name, i_kind, i_state, i_payload, i_result, j_clear, j_name, j_state, j_data);
    ELSE
        SELECT revision INTO r_revision FROM stepwell_session
        WHERE key = p_key AND id = p_id AND incarnation = p_incarnation AND epoch = p_epoch AND owner = p_owner;
    END IF;
    RETURN NEXT;
END $$;

-- No row where the lease is not current.
CREATE FUNCTION stepwell_session_journal_put_1(
    p_id bytea, p_key bigint, p_incarnation bigint, p_epoch bigint, p_owner bytea,
    p_name bytea, p_state bigint, p_data bytea
) RETURNS SETOF boolean LANGUAGE plpgsql AS $$
BEGIN
    -- Shared, so that the tools of a batch do not wait for each other's way to the disk.
    PERFORM FROM stepwell_session
    WHERE key = p_key AND id = p_id AND incarnation = p_incarnation AND epoch = p_epoch AND owner = p_owner FOR SHARE;
    IF FOUND THEN
        PERFORM stepwell_session_flush_1();
        PERFORM stepwell_session_journal_1(p_key, p_name, p_state, p_data);
        RETURN NEXT true;
    END IF;
END $$;

-- The row that is there afterwards; none where there is no session.
CREATE FUNCTION stepwell_session_inbox_put_1(
    p_id bytea, p_name bytea, p_kind bigint, p_state bigint, p_payload bytea, p_result bytea
) RETURNS TABLE (r_name bytea, r_kind smallint, r_state smallint, r_payload bytea, r_result bytea)
LANGUAGE plpgsql AS $$
DECLARE
    v_key bigint;
BEGIN
    -- One after the other, so that rows become visible in the order of their numbers, and a deletion leaves none.
    SELECT key INTO v_key FROM stepwell_session WHERE id = p_id FOR NO KEY UPDATE;
    IF FOUND THEN
        INSERT INTO stepwell_session_inbox (session, name, kind, state, payload, result)
        VALUES (v_key, p_name, p_kind, p_state, p_payload, p_result) ON CONFLICT DO NOTHING;
        RETURN QUERY SELECT name, kind, state, payload, result FROM stepwell_session_inbox
            WHERE session = v_key AND sha256(name) = sha256(p_name);
    END IF;
END $$;

-- No row where there is no session.
CREATE FUNCTION stepwell_session_delete_1(p_id bytea) RETURNS SETOF boolean LANGUAGE plpgsql AS $$
DECLARE
    v_key bigint;
BEGIN
    DELETE FROM stepwell_session WHERE id = p_id RETURNING key INTO v_key;
    IF FOUND THEN
        DELETE FROM stepwell_session_line WHERE session = v_key;
        DELETE FROM stepwell_session_inbox WHERE session = v_key;
        DELETE FROM stepwell_session_journal WHERE session = v_key;
        RETURN NEXT true;
    END IF;
END $$;
"""


def closed() -> StoreError:
    """The store was closed."""
    return StoreError("This session store is closed: open a new one.")


PART: Final = Part(
    name="session",
    whole="the session store",
    pointer="/store",
    lock=0x5357_5345_5353,
    migrations=([_TABLES, _HELPERS, _CALLS],),
    error=StoreError,
    busy=StoreBusyError,
    data=StoreDataError,
    closed=closed,
)

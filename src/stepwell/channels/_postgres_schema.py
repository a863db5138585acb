"""What a channel is in PostgreSQL: tables, the functions that every write is one call of, and their migrations.

One row per channel, which holds the position of its newest mutation; one per message, with its text as of the last time
it was whole; one per append to a stream that is still open. Closing a stream writes the whole text and frees the
appends. Headers that many messages repeat are stored once per channel, under their hash.

Whoever writes to a channel updates its row first, and so holds it until the commit: positions become visible in their
order, and a reader that goes by position misses none. (A sequence would give out 7 and 8, commit 8 first, and a reader
that has seen 8 never looks for 7.) Nothing is ever held while a client thinks: a write is one statement.

What callers name or write is `bytea`: PostgreSQL's text has no NUL, and depends on the database's encoding.
"""

from __future__ import annotations

from typing import Final

from stepwell._postgres import Part
from stepwell.errors import ChannelBusyError, ChannelDataError, ChannelError

from ._refusals import closed

__all__ = ["APPEND", "CONTINUE", "CREATE", "FENCE", "FENCED", "GAP", "NOT_TEXT", "OK", "PART", "UNKNOWN", "UPDATE"]

CREATE, CONTINUE, APPEND, UPDATE, FENCE = "create", "continue", "append", "update", "fence"
"""What a row of a write is. `continue` is a message of the same publish call as the row before."""

OK, FENCED, GAP, UNKNOWN, NOT_TEXT = "ok", "fenced", "gap", "unknown", "not_text"
"""What came of it. With `fenced` comes the fence, with `gap` the number of appends."""

# `series` is drawn as `stepwell.wire.new_series` does. `floor`: cursors below cannot be continued from. `swept`: when
# the channel was last looked through. The row is updated by every write, in place while its page has room.
_TABLES: Final = """
CREATE TABLE stepwell_channel (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE,
    series text COLLATE "C" NOT NULL UNIQUE
        DEFAULT translate(lower(left(encode(uuid_send(gen_random_uuid()), 'base64'), 10)), '+/', '89'),
    head bigint NOT NULL DEFAULT 0,
    floor bigint NOT NULL DEFAULT 0,
    fence bigint NOT NULL DEFAULT 0,
    swept bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- whole: position at which data and extras were last stored whole. applied: appends that were applied until then.
-- changed: when, in milliseconds. headers: hash of the shared part of the extras. rest: null if there are none.
CREATE TABLE stepwell_channel_message (
    channel bigint NOT NULL,
    position bigint NOT NULL,
    place integer NOT NULL,
    name bytea NOT NULL,
    text boolean NOT NULL,
    data bytea,
    headers bytea,
    rest bytea,
    client bytea,
    key bytea,
    whole bigint NOT NULL,
    applied bigint NOT NULL,
    open boolean NOT NULL,
    ephemeral boolean NOT NULL,
    changed bigint NOT NULL,
    PRIMARY KEY (channel, position)
);
CREATE UNIQUE INDEX stepwell_channel_message_key ON stepwell_channel_message (channel, key) WHERE key IS NOT NULL;
CREATE UNIQUE INDEX stepwell_channel_message_whole ON stepwell_channel_message (channel, whole) WHERE whole > position;
CREATE INDEX stepwell_channel_message_ephemeral ON stepwell_channel_message (channel, changed) WHERE ephemeral;

-- headers and rest: null where they are those of the message.
CREATE TABLE stepwell_channel_append (
    channel bigint NOT NULL,
    message bigint NOT NULL,
    seq bigint NOT NULL,
    position bigint NOT NULL,
    data bytea NOT NULL,
    headers bytea,
    rest bytea,
    changed bigint NOT NULL,
    PRIMARY KEY (channel, message, seq)
);
CREATE UNIQUE INDEX stepwell_channel_append_position ON stepwell_channel_append (channel, position);

CREATE TABLE stepwell_channel_headers (
    channel bigint NOT NULL,
    hash bytea NOT NULL,
    headers bytea NOT NULL,
    PRIMARY KEY (channel, hash)
);

CREATE TABLE stepwell_channel_deleted (channel bigint PRIMARY KEY);
"""

# Bounded, so that no write waits long: what is left over is done by the next. Whoever calls holds the channel's row, so
# one does it at a time. Retention only raises the floor: nothing newer than it lies at or below. What cursors below the
# floor would need was freed when streams were closed.
_SWEEP: Final = """
CREATE FUNCTION stepwell_channel_sweep_1(
    c INOUT stepwell_channel, p_now bigint, p_retention bigint
) LANGUAGE plpgsql AS $$
DECLARE
    v_swept integer;
BEGIN
    DELETE FROM stepwell_channel_message m USING (
        SELECT position FROM stepwell_channel_message
        WHERE channel = c.id AND ephemeral AND changed <= p_now - 60000 ORDER BY changed LIMIT 1000
    ) due WHERE m.channel = c.id AND m.position = due.position;
    GET DIAGNOSTICS v_swept = ROW_COUNT;
    IF v_swept < 1000 THEN
        c.swept := p_now;
    END IF;
    IF p_retention IS NOT NULL THEN
        SELECT greatest(c.floor, least(
            c.head,
            (SELECT position FROM stepwell_channel_message
             WHERE channel = c.id AND position > c.floor AND changed > p_now - p_retention
             ORDER BY position LIMIT 1) - 1,
            (SELECT whole FROM stepwell_channel_message
             WHERE channel = c.id AND whole > c.floor AND whole > position AND changed > p_now - p_retention
             ORDER BY whole LIMIT 1) - 1,
            (SELECT position FROM stepwell_channel_append
             WHERE channel = c.id AND position > c.floor AND changed > p_now - p_retention
             ORDER BY position LIMIT 1) - 1
        )) INTO c.floor;
    END IF;
END $$;
"""

# Rows of several calls to several channels at once; a process sends together what came while it waited for the last
# answer. `p_channels` are in order, so that two processes never wait for each other; the rows of each are adjacent,
# `p_sizes` of them, in the order of their calls. What one row is refused for touches no other: nothing is raised.
#
# The first statement for a channel takes its lock and as many positions as there are rows. Only behind it is looked at
# the fence, keys and counts of appends: they are those that the last writer left (every statement of a function sees
# what is committed by then, in the isolation level that the connections ask for).
_WRITE: Final = """
CREATE FUNCTION stepwell_channel_write_1(
    p_now bigint, p_retention bigint, p_channels text[], p_sizes bigint[],
    p_kinds text[], p_epochs bigint[],
    p_series text[], p_messages bigint[], p_places bigint[], p_seqs bigint[],
    p_names bytea[], p_clients bytea[], p_keys bytea[], p_ephemeral boolean[],
    p_text boolean[], p_data bytea[], p_open boolean[], p_hashes bytea[], p_headers bytea[], p_rests bytea[]
) RETURNS TABLE (r_outcome text, r_series text, r_number bigint, r_place integer) LANGUAGE plpgsql AS $$
DECLARE
    c stepwell_channel;
    m record;
    v_now bigint;
    v_end integer := 0;
    v_begin integer;
    v_position bigint;
    v_first bigint;
    v_fence bigint;
    v_headers bytea;
    v_rest bytea;
BEGIN
    FOR g IN 1 .. cardinality(p_channels) LOOP
        UPDATE stepwell_channel SET head = head + p_sizes[g] WHERE name = p_channels[g] RETURNING * INTO c;
        IF NOT FOUND THEN
            INSERT INTO stepwell_channel AS other (name, head) VALUES (p_channels[g], p_sizes[g])
                ON CONFLICT (name) DO UPDATE SET head = other.head + excluded.head RETURNING * INTO c;
        END IF;
        v_now := coalesce(p_now, extract(epoch FROM clock_timestamp()) * 1000);
        v_position := c.head - p_sizes[g];
        v_fence := c.fence;
        v_begin := v_end + 1;
        v_end := v_end + p_sizes[g];
        FOR k IN v_begin .. v_end LOOP
            r_outcome := 'ok';
            r_series := c.series;
            r_number := NULL;
            r_place := NULL;
            IF p_kinds[k] = 'create' THEN
                v_first := v_position;
            END IF;

            IF p_epochs[k] < v_fence THEN
                r_outcome := 'fenced';
                r_number := v_fence;

            ELSIF p_kinds[k] = 'fence' THEN
                v_fence := p_epochs[k];

            ELSIF p_kinds[k] IN ('create', 'continue') THEN
                IF p_keys[k] IS NOT NULL THEN
                    SELECT position, place INTO r_number, r_place
                        FROM stepwell_channel_message WHERE channel = c.id AND key = p_keys[k];
                END IF;
                IF r_number IS NULL THEN
                    IF p_hashes[k] IS NOT NULL THEN
                        INSERT INTO stepwell_channel_headers VALUES (c.id, p_hashes[k], p_headers[k])
                            ON CONFLICT DO NOTHING;
                    END IF;
                    v_position := v_position + 1;
                    r_number := v_position;
                    r_place := v_position - v_first - 1;
                    INSERT INTO stepwell_channel_message VALUES (
                        c.id, v_position, r_place, p_names[k], p_text[k], p_data[k], p_hashes[k], p_rests[k],
                        p_clients[k], p_keys[k], v_position, 0, p_open[k] AND NOT p_ephemeral[k], p_ephemeral[k], v_now
                    );
                END IF;

            ELSE
                SELECT msg.place, msg.text AND msg.data IS NOT NULL AS appendable, msg.headers, msg.rest,
                        msg.open, msg.ephemeral,
                        coalesce(newest.seq, msg.applied) AS applied, coalesce(newest.position, msg.whole) AS version,
                        newest.headers AS new_headers, newest.rest AS new_rest
                    INTO m FROM stepwell_channel_message msg LEFT JOIN LATERAL (
                        SELECT seq, position, headers, rest FROM stepwell_channel_append
                        WHERE channel = msg.channel AND message = msg.position ORDER BY seq DESC LIMIT 1
                    ) newest ON msg.open
                    WHERE msg.channel = c.id AND msg.position = p_messages[k];
                IF NOT FOUND OR p_series[k] <> c.series OR m.place <> p_places[k] THEN
                    r_outcome := 'unknown';
                ELSIF p_kinds[k] = 'append' AND p_seqs[k] BETWEEN 1 AND m.applied THEN
                    r_number := m.version;
                ELSIF p_kinds[k] = 'append' AND p_seqs[k] <> m.applied + 1 THEN
                    r_outcome := 'gap';
                    r_number := m.applied;
                ELSIF p_kinds[k] = 'append' AND NOT m.appendable THEN
                    r_outcome := 'not_text';
                ELSE
                    v_position := v_position + 1;
                    r_number := v_position;
                    -- No extras: what holds goes on, be it the message's (null) or the last append's.
                    v_headers := m.new_headers;
                    v_rest := m.new_rest;
                    IF p_rests[k] IS NOT NULL THEN
                        v_headers := NULL;
                        v_rest := NULL;
                        IF p_rests[k] IS DISTINCT FROM m.rest OR p_hashes[k] IS DISTINCT FROM m.headers THEN
                            v_headers := p_hashes[k];
                            v_rest := p_rests[k];
                            IF v_headers IS NOT NULL THEN
                                INSERT INTO stepwell_channel_headers VALUES (c.id, v_headers, p_headers[k])
                                    ON CONFLICT DO NOTHING;
                            END IF;
                        END IF;
                    END IF;
                    IF p_kinds[k] = 'append' AND m.open AND (p_rests[k] IS NULL OR p_open[k]) THEN
                        INSERT INTO stepwell_channel_append VALUES (
                            c.id, p_messages[k], p_seqs[k], v_position, p_data[k], v_headers, v_rest, v_now
                        );
                    ELSE
                        UPDATE stepwell_channel_message SET
                                text = p_text[k],
                                data = CASE WHEN p_kinds[k] = 'update' THEN p_data[k] ELSE data || coalesce((
                                        SELECT string_agg(a.data, '' ORDER BY a.seq) FROM stepwell_channel_append a
                                        WHERE m.open AND a.channel = c.id AND a.message = p_messages[k]
                                    ), '') || p_data[k] END,
                                headers = CASE WHEN v_rest IS NULL THEN headers ELSE v_headers END,
                                rest = coalesce(v_rest, rest),
                                whole = v_position,
                                applied = CASE WHEN p_kinds[k] = 'update' THEN m.applied ELSE p_seqs[k] END,
                                open = p_kinds[k] = 'update' AND p_open[k] AND NOT ephemeral,
                                changed = v_now
                            WHERE channel = c.id AND position = p_messages[k];
                        IF m.open THEN
                            DELETE FROM stepwell_channel_append WHERE channel = c.id AND message = p_messages[k];
                        END IF;
                    END IF;
                END IF;
            END IF;
            RETURN NEXT;
        END LOOP;

        -- What a call took and did not use is given back.
        IF v_position < c.head OR v_fence > c.fence OR v_now >= c.swept + 5000 THEN
            c.head := v_position;
            IF v_now >= c.swept + 5000 THEN
                c := stepwell_channel_sweep_1(c, v_now, p_retention);
            END IF;
            UPDATE stepwell_channel SET head = c.head, fence = v_fence, floor = c.floor, swept = c.swept
                WHERE id = c.id;
        END IF;
    END LOOP;
END $$;
"""

# A channel is gone with its row. What it held goes after that, in pieces, by whoever deletes: so a large channel holds
# nobody up, and what a process leaves that dies over it is found by the next.
_DELETE: Final = """
CREATE FUNCTION stepwell_channel_delete_1(p_name text) RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE
    c stepwell_channel;
BEGIN
    DELETE FROM stepwell_channel WHERE name = p_name RETURNING * INTO c;
    IF FOUND THEN
        INSERT INTO stepwell_channel_deleted VALUES (c.id);
        RETURN NEXT c.series;
    END IF;
END $$;

CREATE FUNCTION stepwell_channel_purge_1(OUT r_more boolean) LANGUAGE plpgsql AS $$
DECLARE
    v_channel bigint;
BEGIN
    SELECT channel INTO v_channel FROM stepwell_channel_deleted LIMIT 1 FOR UPDATE SKIP LOCKED;
    r_more := FOUND;
    DELETE FROM stepwell_channel_append a USING (
        SELECT message, seq FROM stepwell_channel_append WHERE channel = v_channel LIMIT 5000
    ) due WHERE a.channel = v_channel AND a.message = due.message AND a.seq = due.seq;
    IF NOT FOUND THEN
        DELETE FROM stepwell_channel_message m USING (
            SELECT position FROM stepwell_channel_message WHERE channel = v_channel LIMIT 5000
        ) due WHERE m.channel = v_channel AND m.position = due.position;
    END IF;
    IF NOT FOUND THEN
        DELETE FROM stepwell_channel_headers h USING (
            SELECT hash FROM stepwell_channel_headers WHERE channel = v_channel LIMIT 5000
        ) due WHERE h.channel = v_channel AND h.hash = due.hash;
    END IF;
    IF NOT FOUND THEN
        DELETE FROM stepwell_channel_deleted WHERE channel = v_channel;
    END IF;
END $$;
"""

PART: Final = Part(
    name="channel",
    whole="the channels",
    pointer="/channels",
    lock=0x5357_4348_414E,
    migrations=([_TABLES, _SWEEP, _WRITE, _DELETE],),
    error=ChannelError,
    busy=ChannelBusyError,
    data=ChannelDataError,
    closed=closed,
)

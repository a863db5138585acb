"""What a channel is in Redis, and the Lua that works on it. Every write is one call of one script, so it is atomic.

Keys of a channel; `{name}` keeps them in one slot of a cluster. Positions are those of the channel's log.

```text
<prefix>:{name}            hash    series, head, floor, fence, time (of the newest mutation), swept, ext
<prefix>:{name}:log        stream  id <position>-0: every message as it was created; log and history at once
<prefix>:{name}:eph        stream  the same of ephemeral messages, which go after a minute
<prefix>:{name}:msg        hash    position -> message as it is now; only of those changed since
<prefix>:{name}:ext        hash    id -> headers that several messages share
<prefix>:{name}:ids        hash    idempotency id -> position and place
<prefix>:{name}:whole      zset    messages that were replaced or closed, by the position of that
<prefix>:{name}:open       zset    messages that are appended to, by the position of the newest append
<prefix>:{name}:marks      zset    positions by their time: only to know what retention lets go
<prefix>:{name}:text:<p>   string  text of an open message
<prefix>:{name}:rows:<p>   stream  id <position>-0: the appends of an open message
<prefix>:{name}:bell       not a key: where `<head>@<series>` is published after every mutation
```

An append is a row in a stream of its message's own, so closing the message frees all of them with one key. In a stream
that messages share, a block of a hundred rows would stay for as long as one of them does.

A record is what Lua and Python both read of a message, an array in MessagePack:

```text
 1 kind   s open text, t text, j JSON, n none       7 same    appends have the extras of the create
 2 index  in its publish call                       8 ext     id of the shared headers, or false
 3 version                                          9 rest    of the extras, JSON, or false
 4 time   of the version, ms                       10 data    text or JSON; false: in text:<p>, or none
 5 applied  appends                                11 name
 6 whole  position of create or last replacement   12 client  or false
```

Lua passes payloads on as they are and never looks into them. Its numbers are positions, times, counts and fences, all
below 2^53, up to which they are exact. The first write of each script is one that Redis refuses when it
is out of memory or read-only, so such a script has done nothing.
"""

from __future__ import annotations

from hashlib import sha1
from typing import Final

__all__ = ["APPEND", "BOUNDS", "DELETE", "FENCE", "MESSAGE", "MESSAGES", "PUBLISH", "ROWS", "SCRIPTS", "UPDATE"]

_KEYS: Final = """
local base = KEYS[1]
local LOG, EPH, MSG, EXT, IDS = base .. ':log', base .. ':eph', base .. ':msg', base .. ':ext', base .. ':ids'
local WHOLE, OPEN, MARKS, BELL = base .. ':whole', base .. ':open', base .. ':marks', base .. ':bell'
local call, pack, unpack_ = redis.call, cmsgpack.pack, cmsgpack.unpack
local function text_of(p) return base .. ':text:' .. p end
local function rows_of(p) return base .. ':rows:' .. p end
local function str(n) return string.format('%.0f', n) end
local function position(id) return string.sub(id, 1, -3) end  -- of an entry with the id <position>-0

-- The message as it was created, or nil.
local function created(p)
  for _, log in ipairs({LOG, EPH}) do
    local found = call('XRANGE', log, p .. '-0', p .. '-0')[1]
    if found then return unpack_(found[2][2]) end
  end
end
"""

_WRITE: Final = (
    _KEYS
    + """
-- ARGV[1]: the time in ms, or '' for the server's.
local function clock()
  if ARGV[1] ~= '' then return tonumber(ARGV[1]) end
  local now = call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

local function ring(head, series) call('PUBLISH', BELL, str(head) .. '@' .. series) end

-- The channel's hash, made under the name `new` if there is none and a name is given.
local function open_log(new)
  local found = call('HMGET', base, 'series', 'head', 'fence', 'time')
  if found[1] then return found[1], tonumber(found[2]), found[3], tonumber(found[4]) end
  if not new then return false, 0, '0', 0 end
  call('HSET', base, 'series', new, 'head', 0, 'floor', 0, 'fence', 0, 'time', 0)
  ring(0, new)  -- a reader that knows the head of a log before this one must not go on waiting for it
  return new, 0, '0', 0
end

local function stale(epoch, fence) return epoch ~= '' and tonumber(epoch) < tonumber(fence) end

-- The id under which shared headers are kept. Mostly they are those of the message before.
local function share(text, at, keep)
  local last = call('HGET', base, 'ext')
  if last and call('HGET', EXT, last) == text then return tonumber(last) end
  call('HSET', EXT, str(at), text)
  if keep then call('HSET', base, 'ext', str(at)) end
  return at
end
"""
)

_CHANGE: Final = (
    _WRITE
    + """
-- ARGV[2..5]: series, epoch, position and index of the message.
local series, head, fence = open_log(false)
if stale(ARGV[3], fence) then return {'fenced', fence} end
if series ~= ARGV[2] then return {'missing'} end
local p = ARGV[4]
local now = call('HGET', MSG, p)
local rec = now and unpack_(now) or created(p)
if not rec or rec[2] ~= tonumber(ARGV[5]) then return {'missing'} end
head = head + 1

-- Whether the extras given differ from the message's; then they become the message's.
local function set_extras(shared, rest)
  local old = rec[8] and call('HGET', EXT, str(rec[8])) or ''
  if old == shared and (rec[9] or '') == rest then return end
  if old ~= shared then rec[8] = shared ~= '' and share(shared, head, true) end
  rec[9], rec[7] = rest ~= '' and rest, false
end

-- Store the message whole: what it consisted of before says nothing more.
local function replace(kind, data)
  rec[1], rec[6] = kind, rec[3]
  if kind == 's' then
    call('SET', text_of(p), data)
    rec[10], rec[7] = false, false
    call('ZADD', OPEN, rec[3], p)
  else
    call('UNLINK', text_of(p))
    rec[10] = kind ~= 'n' and data
    call('ZREM', OPEN, p)
  end
  call('UNLINK', rows_of(p))
  call('ZADD', WHOLE, rec[3], p)
end

local function stored()
  call('HSET', MSG, p, pack(rec))
  ring(head, series)
  return {'ok', str(head)}
end
"""
)

FENCE: Final = (
    _WRITE
    + """
-- ARGV[2]: name for a new log. ARGV[3]: the epoch.
local series, head, fence = open_log(ARGV[2])
if stale(ARGV[3], fence) then return {'fenced', fence} end
call('HSET', base, 'fence', ARGV[3])
return {'ok'}
"""
)

BOUNDS: Final = (
    _WRITE
    + """
-- ARGV[2]: name for a new log.
open_log(ARGV[2])
return call('HMGET', base, 'series', 'head', 'floor')
"""
)

PUBLISH: Final = (
    _WRITE
    + """
-- ARGV[2..4]: name for a new log, epoch, retention in ms or ''. Then the messages, each an array in MessagePack:
-- idempotency id, kind, name, client, shared headers, rest of the extras, data, ephemeral; false for none.
local series, first, fence, last = open_log(ARGV[2])
if stale(ARGV[3], fence) then return {'fenced', fence} end
local now, head, reply = clock(), first, {'ok', series}

local function create(given)
  local id, kind, name, client, shared, rest, data, ephemeral = unpack(given)
  head = head + 1
  local ext = shared and share(shared, head, not ephemeral)
  local rec = {kind, head - first - 1, head, now, 0, head, true, ext, rest, data, name, client}
  if ephemeral then
    call('XADD', EPH, str(head) .. '-0', 'm', pack(rec), 'id', id or '')
  else
    call('XADD', LOG, str(head) .. '-0', 'm', pack(rec))
  end
  if kind == 's' then call('ZADD', OPEN, head, str(head)) end
  if id then call('HSET', IDS, id, str(head) .. ' ' .. rec[2]) end
  return head, rec[2]
end

for i = 5, #ARGV do
  local given = unpack_(ARGV[i])
  local known = given[1] and call('HGET', IDS, given[1])
  local at, index
  if known then at, index = string.match(known, '(%d+) (%d+)') else at, index = create(given) end
  reply[#reply + 1] = tonumber(at)
  reply[#reply + 1] = tonumber(index)
end
if head == first then return reply end
call('HSET', base, 'head', head, 'time', now)
ring(head, series)

-- An ephemeral message is gone, with everything that was kept of it.
local function forget(entry, rec)
  local p = position(entry[1])
  call('XDEL', EPH, entry[1])
  call('HDEL', IDS, entry[2][4])
  call('HDEL', MSG, p)
  call('ZREM', WHOLE, p)
  call('ZREM', OPEN, p)
  call('UNLINK', text_of(p), rows_of(p))
  if rec[8] == tonumber(p) and call('HGET', base, 'ext') ~= p then call('HDEL', EXT, p) end
end

local function forget_ephemerals()
  for _, entry in ipairs(call('XRANGE', EPH, '-', '+', 'COUNT', 1000)) do
    local changed = call('HGET', MSG, position(entry[1]))
    local rec = unpack_(changed or entry[2][2])
    if rec[4] > now - 60000 then break end
    forget(entry, rec)
  end
  if call('XLEN', EPH) == 0 then call('UNLINK', EPH) end
end

-- Everything up to `first` was written at `last` or before. A mark for each hundredth of the retention says when.
local function raise_floor(retention)
  local limit = now - retention
  local newest = call('ZREVRANGE', MARKS, 0, 0, 'WITHSCORES')[2]
  if not newest or last - newest >= retention / 100 then call('ZADD', MARKS, last, str(first)) end
  local mark = str(first)
  if last > limit then mark = call('ZREVRANGEBYSCORE', MARKS, limit, '-inf', 'LIMIT', 0, 1)[1] end
  if not mark then return end
  call('ZREMRANGEBYSCORE', MARKS, '-inf', limit)
  if tonumber(mark) <= tonumber(call('HGET', base, 'floor')) then return end
  call('HSET', base, 'floor', mark)
  call('ZREMRANGEBYSCORE', WHOLE, '-inf', mark)
  for _, p in ipairs(call('ZRANGE', OPEN, 0, -1)) do
    call('XTRIM', rows_of(p), 'MINID', str(mark + 1) .. '-0')
  end
end

-- Now and then: every five seconds, or ten times in the time of a shorter retention.
local retention = tonumber(ARGV[4])
local swept = tonumber(call('HGET', base, 'swept') or 0)
if math.abs(now - swept) >= math.min(5000, (retention or 50000) / 10) then
  call('HSET', base, 'swept', now)
  forget_ephemerals()
  if retention then raise_floor(retention) end
end
return reply
"""
)

APPEND: Final = (
    _CHANGE
    + """
-- ARGV[6..10]: sequence, text, whether the extras 'keep' the state, or say 'open' or 'closed', shared headers, rest.
local seq, text, mode = tonumber(ARGV[6]), ARGV[7], ARGV[8]
if seq >= 1 and seq <= rec[5] then return {'ok', str(rec[3])} end
if seq ~= rec[5] + 1 then return {'gap', rec[5]} end
if rec[1] ~= 's' and rec[1] ~= 't' then return {'text'} end
local ms = clock()
call('HSET', base, 'head', head, 'time', ms)
rec[3], rec[4], rec[5] = head, ms, seq
if mode ~= 'keep' then set_extras(ARGV[9], ARGV[10]) end
if rec[1] == 's' and mode ~= 'closed' then
  if rec[10] then  -- the first append: the text begins with that of the create
    if rec[10] ~= '' then call('SET', text_of(p), rec[10]) end
    rec[10] = false
  end
  call('APPEND', text_of(p), text)
  local row = {ms, text}
  if not rec[7] then row[3], row[4] = rec[8], rec[9] end
  call('XADD', rows_of(p), str(head) .. '-0', 'm', pack(row))
  call('ZADD', OPEN, head, p)
else
  replace(mode == 'open' and 's' or 't', (rec[10] or call('GET', text_of(p)) or '') .. text)
end
return stored()
"""
)

UPDATE: Final = (
    _CHANGE
    + """
-- ARGV[6..9]: kind, data, shared headers, rest.
local ms = clock()
call('HSET', base, 'head', head, 'time', ms)
rec[3], rec[4] = head, ms
set_extras(ARGV[8], ARGV[9])
replace(ARGV[6], ARGV[7])
return stored()
"""
)

DELETE: Final = (
    _KEYS
    + """
for _, p in ipairs(call('ZRANGE', OPEN, 0, -1)) do call('UNLINK', text_of(p), rows_of(p)) end
call('UNLINK', base, LOG, EPH, MSG, EXT, IDS, WHOLE, OPEN, MARKS)
call('PUBLISH', BELL, '')
"""
)

_READ: Final = (
    _KEYS
    + """
-- Rows for the reply: place in the log, position of the message, record, text if it is kept apart. And, once each, the
-- shared headers that they name.
local rows, headers, seen = {}, {}, {}
local function name_headers(id)
  if id and not seen[id] then
    seen[id] = true
    headers[#headers + 1] = {id, call('HGET', EXT, str(id)) or false}
  end
end
local function add(place, p, rec)
  local apart = rec[1] == 's' and not rec[10] and (call('GET', text_of(p)) or '')
  name_headers(rec[8])
  rows[#rows + 1] = {tonumber(place), tonumber(p), rec, apart}
end
local function as_now(p, entry)
  local changed = call('HGET', MSG, p)
  if changed then return unpack_(changed) end
  return entry and unpack_(entry[2][2]) or created(p)
end

-- What is ephemeral and was not changed for a minute is gone, whether it was removed yet or not: that waits for a
-- publish. The last argument is the time in ms, or '' for the server's.
local limit_of_ephemerals
local function is_gone(p, rec)
  if not limit_of_ephemerals then
    local now = tonumber(ARGV[#ARGV])
    if not now then
      local time = call('TIME')
      now = time[1] * 1000 + math.floor(time[2] / 1000)
    end
    limit_of_ephemerals = now - 60000
  end
  return rec[4] <= limit_of_ephemerals and #call('XRANGE', EPH, p .. '-0', p .. '-0') > 0
end
"""
)

MESSAGE: Final = (
    _READ
    + """
-- ARGV[1]: position.
local rec = as_now(ARGV[1])
if rec and not is_gone(ARGV[1], rec) then add(ARGV[1], ARGV[1], rec) end
return pack({rows, headers})
"""
)

MESSAGES: Final = (
    _READ
    + """
-- ARGV[1..3]: 'after' or 'before', position, limit.
local found
if ARGV[1] == 'after' then
  found = call('XRANGE', LOG, '(' .. ARGV[2] .. '-0', '+', 'COUNT', ARGV[3])
else
  found = call('XREVRANGE', LOG, ARGV[2] .. '-0', '-', 'COUNT', ARGV[3])
end
for _, entry in ipairs(found) do
  local p = position(entry[1])
  add(p, p, as_now(p, entry))
end
return pack({rows, headers})
"""
)

ROWS: Final = (
    _READ
    + """
-- ARGV[1..3]: series, position, limit. Of creates, replacements and appends the first `limit` each.
local found = call('HMGET', base, 'series', 'head', 'floor')
local after, limit = ARGV[2], tonumber(ARGV[3])
if found[1] ~= ARGV[1] or tonumber(after) < tonumber(found[3]) then return false end
local appends, heads = {}, {}

-- What is gone does not count: behind it there may be what is not.
for _, log in ipairs({LOG, EPH}) do
  local from, left, entries = after, limit, nil
  repeat
    entries = call('XRANGE', log, '(' .. from .. '-0', '+', 'COUNT', limit)
    for _, entry in ipairs(entries) do
      local p = position(entry[1])
      local rec = as_now(p, entry)
      if log ~= EPH or not is_gone(p, rec) then
        -- Only appended to: its create comes as it was, and the appends are rows of their own.
        if rec[6] == tonumber(p) then rec = unpack_(entry[2][2]) end
        add(p, p, rec)
        left = left - 1
      end
      from = p
    end
  until #entries < limit or left <= 0
end

local from, left, whole = after, limit, nil
repeat
  whole = call('ZRANGEBYSCORE', WHOLE, '(' .. from, '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
  for i = 1, #whole, 2 do
    local rec = as_now(whole[i])
    if not is_gone(whole[i], rec) then
      add(whole[i + 1], whole[i], rec)
      left = left - 1
    end
    from = whole[i + 1]
  end
until #whole < 2 * limit or left <= 0

local function earliest(a, b) return a[1] < b[1] end
local function cut()
  table.sort(appends, earliest)
  for i = #appends, limit + 1, -1 do appends[i] = nil end
end
for _, p in ipairs(call('ZRANGEBYSCORE', OPEN, '(' .. after, '+inf')) do
  local gone = is_gone(p, as_now(p))
  local entries = gone and {} or call('XRANGE', rows_of(p), '(' .. after .. '-0', '+', 'COUNT', limit)
  if #entries > 0 then
    local rec = created(p)
    name_headers(rec[8])
    rec[10] = false
    heads[#heads + 1] = {tonumber(p), rec}
  end
  for _, entry in ipairs(entries) do
    local row = unpack_(entry[2][2])
    name_headers(row[3])
    appends[#appends + 1] = {tonumber(position(entry[1])), tonumber(p), row}
  end
  if #appends > 4 * limit then cut() end  -- many messages that were never closed must not fill the memory
end
return pack({tonumber(found[2]), rows, headers, appends, heads})
"""
)

_ALL: Final = (FENCE, BOUNDS, PUBLISH, APPEND, UPDATE, DELETE, MESSAGE, MESSAGES, ROWS)

SCRIPTS: Final = {text: sha1(text.encode(), usedforsecurity=False).hexdigest() for text in _ALL}
"""Each script's name on the server."""

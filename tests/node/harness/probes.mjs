// Hand-made publishes (no SDK agent) read by the UNMODIFIED client session: which wire facts does the client depend on?
// node probes.mjs FILE: writes { probe: observed } there.
import fs from 'node:fs';
import { Ctx, countedUuids, settle, text, msgs } from './lib.mjs';
import { createClientSession } from '@ably/ai-transport/vercel';

const results = {}; const keepAlive = setInterval(() => {}, 1000); void keepAlive;
const ai = (transport, codec) => ({ ai: codec ? { transport, codec } : { transport } });
const probe = (name, fn) => countedUuids(async () => { if (process.env.V) console.error('>', name);
  const ctx = new Ctx(`probe-${name}`);
  const cc = await ctx.client('user-a'); const client = createClientSession({ client: cc, channelName: ctx.channelName }); await client.connect();
  const errs = []; client.on('error', (e) => errs.push(e.code));
  const ac = await ctx.client('py-agent'); const ch = ac.channels.get(ctx.channelName);
  const lateJoin = async () => { const c = createClientSession({ client: await ctx.client('late'), channelName: ctx.channelName }); await c.connect(); await c.view.loadOlder(100); return c; };
  const api = {
    ctx, client, ch, errs, lateJoin, hub: ctx.hub,
    pub: async (name2, transport, { data, codec, extras } = {}) => (await ch.publish({ name: name2, ...(data === undefined ? {} : { data }), extras: extras ?? ai(transport, codec) })).serials[0],
    app: async (serial, data, transport, codec) => ch.appendMessage({ serial, data, extras: ai(transport, codec) }),
    input: async (cmid, t, more = {}) => (await ch.publish([{ name: 'ai-input', data: t, extras: ai({ role: 'user', 'codec-message-id': cmid, 'event-id': `e-${cmid}`, stream: 'false', discrete: 'true', ...more }, { kind: 'user-message', partType: 'text', messageId: cmid }) }])).serials[0],
    view: () => text(client.view), runs: () => client.view.runs().map((r) => ({ runId: r.runId, status: r.status, steps: r.steps })),
  };
  const out = await fn(api); await settle(40);
  results[name] = typeof out === 'function' ? out() : out;
  await client.close(); await ctx.done();
});
const say = async (a, { run = 'R', cmid = 'A1', step, serial, textv = 'hi', parent, input, stream = 't1', close = 'complete', extra = {} } = {}) => {
  const t = { role: 'assistant', 'codec-message-id': cmid, 'run-id': run, ...(parent ? { parent } : {}), ...(input ? { 'input-codec-message-id': input } : {}), ...(step ? { 'step-id': step } : {}), ...(serial ? { 'step-start-serial': serial } : {}), ...extra };
  const st = { ...t, stream: 'true', status: 'streaming', 'stream-id': stream }; const c = { kind: 'text', id: stream };
  const s = await a.pub('ai-output', st, { data: '', codec: c });
  await a.app(s, textv, st, c);
  if (close) await a.app(s, '', { ...st, status: close }, c);
  return s;
};

await probe('minimal-handmade-run', async (a) => {
  await a.input('U1', 'Hello');
  await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1', 'input-codec-message-id': 'U1' });
  const s = await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S' });
  await say(a, { step: 'S', serial: s, parent: 'U1', input: 'U1' });
  await a.pub('ai-step-end', { 'run-id': 'R', 'step-id': 'S', 'step-start-serial': s, 'step-reason': 'complete' });
  await a.pub('ai-run-end', { 'run-id': 'R', 'run-reason': 'complete' });
  return () => ({ view: a.view(), runs: a.runs(), errors: a.errs, parts: msgs(a.client.view)[1]?.message.parts });
});
await probe('no-step-headers-at-all', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  await say(a, { parent: 'U1' }); await a.pub('ai-run-end', { 'run-id': 'R', 'run-reason': 'complete' });
  return () => ({ view: a.view(), runs: a.runs() });
});
await probe('no-run-start', async (a) => {
  await a.input('U1', 'Hello'); await say(a, { parent: 'U1' });
  return () => ({ view: a.view(), runs: a.runs() });
});
await probe('agent-initiated-run-without-input', async (a) => {
  await a.pub('ai-run-start', { 'run-id': 'R' }); await say(a, {}); await a.pub('ai-run-end', { 'run-id': 'R', 'run-reason': 'complete' });
  return () => ({ view: a.view(), runs: a.runs() });
});
await probe('input-codec-message-id-and-parent-never-observed', async (a) => {
  await a.pub('ai-run-start', { 'run-id': 'R', parent: 'GONE', 'input-codec-message-id': 'GONE' }); await say(a, { parent: 'GONE', input: 'GONE' });
  return () => ({ view: a.view(), runs: a.runs() });
});
await probe('parent-never-observed-without-input-codec-message-id', async (a) => {
  await a.pub('ai-run-start', { 'run-id': 'R', parent: 'GONE' }); await say(a, { parent: 'GONE' });
  return () => ({ view: a.view() });
});
await probe('create-carries-initial-text', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  const st = { role: 'assistant', 'codec-message-id': 'A1', 'run-id': 'R', parent: 'U1', stream: 'true', status: 'streaming', 'stream-id': 't1' }; const c = { kind: 'text', id: 't1' };
  const s = await a.pub('ai-output', st, { data: 'FIRST ', codec: c }); await a.app(s, 'second', st, c); await a.app(s, '', { ...st, status: 'complete' }, c);
  await settle(20); const late = await a.lateJoin(); const lv = text(late.view); await late.close();
  return () => ({ live: a.view(), late: lv });
});
await probe('append-without-extras', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  const st = { role: 'assistant', 'codec-message-id': 'A1', 'run-id': 'R', parent: 'U1', stream: 'true', status: 'streaming', 'stream-id': 't1' }; const c = { kind: 'text', id: 't1' };
  const s = await a.pub('ai-output', st, { data: '', codec: c }); await a.ch.appendMessage({ serial: s, data: 'bare' });
  return () => ({ live: a.view() });
});
await probe('append-with-partial-extras-drops-run-id', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  const st = { role: 'assistant', 'codec-message-id': 'A1', 'run-id': 'R', parent: 'U1', stream: 'true', status: 'streaming', 'stream-id': 't1' }; const c = { kind: 'text', id: 't1' };
  const s = await a.pub('ai-output', st, { data: '', codec: c }); await a.ch.appendMessage({ serial: s, data: 'partial', extras: ai({ status: 'streaming' }) });
  await settle(20); const late = await a.lateJoin(); const lv = text(late.view); await late.close();
  return () => ({ live: a.view(), late: lv, errors: a.errs });
});
await probe('version-serial-not-advanced-on-append', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  const orig = a.hub.channel(a.ctx.channelName)._broadcast;
  a.hub.channel(a.ctx.channelName)._broadcast = function (make) { return orig.call(this, (att) => { const m = make(att); if (m?.action === 'message.append') m.version = { serial: m.serial }; return m; }); };
  await say(a, { parent: 'U1' });
  return () => ({ live: a.view() });
});
await probe('history-returns-create-action-for-appended-message', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' }); await say(a, { parent: 'U1', textv: 'full text' });
  const h = a.hub.channel(a.ctx.channelName); const orig = h.history.bind(h);
  h.history = (o) => { const r = orig(o); for (const i of r.items) i.action = 'message.create'; return r; };
  await settle(20); const late = await a.lateJoin(); const lv = text(late.view); await late.close();
  return () => ({ live: a.view(), late: lv });
});
await probe('history-oldest-first', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  const s1 = await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S' }); await say(a, { step: 'S', serial: s1, parent: 'U1', cmid: 'A1', textv: 'dead', close: null });
  const s2 = await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S' }); await say(a, { step: 'S', serial: s2, parent: 'U1', cmid: 'A2', textv: 'good' });
  await a.pub('ai-step-end', { 'run-id': 'R', 'step-id': 'S', 'step-start-serial': s2, 'step-reason': 'complete' }); await a.pub('ai-run-end', { 'run-id': 'R', 'run-reason': 'complete' });
  const h = a.hub.channel(a.ctx.channelName); const orig = h.history.bind(h); h.history = (o) => { const r = orig(o); r.items.reverse(); return r; };
  await settle(20); const late = await a.lateJoin(); const out = { view: text(late.view), runs: late.view.runs() }; await late.close();
  return () => ({ live: a.view(), late: out });
});
await probe('retry-without-step-start-serial-on-outputs', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S' }); await say(a, { step: 'S', parent: 'U1', cmid: 'A1', textv: 'dead' });
  await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S' }); await say(a, { step: 'S', parent: 'U1', cmid: 'A2', textv: 'good' });
  return () => ({ view: a.view() });
});
await probe('retry-superseding-before-dead-output-arrives', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  const s1 = await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S' });
  const s2 = await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S' });
  await say(a, { step: 'S', serial: s1, parent: 'U1', cmid: 'A1', textv: 'late dead' }); await say(a, { step: 'S', serial: s2, parent: 'U1', cmid: 'A2', textv: 'good' });
  return () => ({ view: a.view(), runs: a.runs() });
});
await probe('retry-reuses-codec-message-id', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  const s1 = await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S' }); await say(a, { step: 'S', serial: s1, parent: 'U1', cmid: 'A1', textv: 'dead', close: null });
  const s2 = await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S' }); await say(a, { step: 'S', serial: s2, parent: 'U1', cmid: 'A1', textv: 'good' });
  return () => ({ view: a.view() });
});
await probe('output-stamped-with-unknown-step-start-serial', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  await say(a, { step: 'S', serial: 'zzz-never-published', parent: 'U1', cmid: 'A1', textv: 'orphan' }); await settle(20); const before = a.view();
  await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S' }); await settle(20);
  return () => ({ beforeAnyStart: before, afterAStart: a.view() });
});
await probe('two-steps-same-codec-message-id-different-step-ids', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  const s1 = await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S1' }); await say(a, { step: 'S1', serial: s1, parent: 'U1', cmid: 'A1', textv: 'one' });
  const s2 = await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S2' }); await say(a, { step: 'S2', serial: s2, parent: 'U1', cmid: 'A1', textv: 'two' });
  return () => ({ view: a.view(), messages: msgs(a.client.view) });
});
await probe('run-end-before-run-start-in-serial-order', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-end', { 'run-id': 'R', 'run-reason': 'complete' }); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  return () => ({ runs: a.runs() });
});
await probe('duplicate-run-start-same-run-id', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1', 'input-codec-message-id': 'U1' }); await say(a, { parent: 'U1', input: 'U1' });
  await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1', 'input-codec-message-id': 'U1' });
  return () => ({ view: a.view(), runs: a.runs() });
});
await probe('run-start-after-run-end-does-not-resurrect', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' }); await say(a, { parent: 'U1' });
  await a.pub('ai-run-end', { 'run-id': 'R', 'run-reason': 'cancelled' }); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' }); await a.pub('ai-run-resume', { 'run-id': 'R' });
  return () => ({ runs: a.runs() });
});
await probe('second-run-end-overwrites-first', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' }); await say(a, { parent: 'U1' });
  await a.pub('ai-run-end', { 'run-id': 'R', 'run-reason': 'complete' }); await a.pub('ai-run-end', { 'run-id': 'R', 'run-reason': 'error', 'error-code': '104008', 'error-message': 'late' });
  return () => ({ runs: a.runs(), errors: a.errs });
});
await probe('late-suspend-of-a-retired-invocation', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1', 'invocation-id': 'I1' }); await say(a, { parent: 'U1' });
  await a.pub('ai-run-resume', { 'run-id': 'R', 'invocation-id': 'I2' }); await a.pub('ai-run-suspend', { 'run-id': 'R', 'invocation-id': 'I1' });
  return () => ({ runs: a.runs() });
});
await probe('output-after-run-end', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' }); await say(a, { parent: 'U1', textv: 'in time' });
  await a.pub('ai-run-end', { 'run-id': 'R', 'run-reason': 'complete' }); await say(a, { parent: 'U1', cmid: 'A2', textv: 'too late' });
  return () => ({ view: a.view(), runs: a.runs() });
});
await probe('tool-output-send-in-own-step-and-message', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  const base = { role: 'assistant', 'run-id': 'R', parent: 'U1', stream: 'false' };
  const s1 = await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S1' });
  await a.pub('ai-output', { ...base, 'codec-message-id': 'A1', 'step-id': 'S1', 'step-start-serial': s1 }, { data: { q: 1 }, codec: { kind: 'tool-input', toolCallId: 'c1', toolName: 'calc' } });
  const s2 = await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S2' });
  await a.pub('ai-output', { ...base, 'codec-message-id': 'A2', 'step-id': 'S2', 'step-start-serial': s2 }, { data: { output: { v: 2 } }, codec: { kind: 'tool-output-available', toolCallId: 'c1' } });
  return () => ({ messages: msgs(a.client.view) });
});
await probe('superseding-a-tool-step-restores-pending-tool', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  const base = { role: 'assistant', 'run-id': 'R', parent: 'U1', stream: 'false' };
  const s1 = await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S1' });
  await a.pub('ai-output', { ...base, 'codec-message-id': 'A1', 'step-id': 'S1', 'step-start-serial': s1 }, { data: { q: 1 }, codec: { kind: 'tool-input', toolCallId: 'c1', toolName: 'calc' } });
  const s2 = await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S2' });
  await a.pub('ai-output', { ...base, 'codec-message-id': 'A2', 'step-id': 'S2', 'step-start-serial': s2 }, { data: { output: 'wrong' }, codec: { kind: 'tool-output-available', toolCallId: 'c1' } }); await settle(20);
  const before = JSON.stringify(msgs(a.client.view)[1].message.parts.at(-1)); await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S2' }); await settle(20);
  return () => ({ before: JSON.parse(before), after: msgs(a.client.view)[1].message.parts.at(-1) });
});
await probe('user-message-published-one-part-per-publish', async (a) => {
  await a.input('U1', 'part one'); await a.input('U1', 'part two');
  return () => ({ messages: msgs(a.client.view) });
});
await probe('non-string-header-values', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  const st = { role: 'assistant', 'codec-message-id': 'A1', 'run-id': 'R', parent: 'U1', stream: true, status: 'streaming', 'stream-id': 't1' }; const c = { kind: 'text', id: 't1' };
  const s = await a.pub('ai-output', st, { data: '', codec: c }); await a.app(s, 'x', st, c);
  return () => ({ view: a.view(), errors: a.errs });
});
await probe('history-page-failure', async (a) => {
  const fc = a.client; await a.input('U1', 'Hello'); await settle(10);
  const late = await a.ctx.client('late'); const ch = late._channels?.get?.(a.ctx.channelName); void ch; void fc;
  const c = createClientSession({ client: late, channelName: a.ctx.channelName }); await c.connect();
  const h = a.hub.channel(a.ctx.channelName); const orig = h.history; let n = 0; h.history = () => { n++; throw Object.assign(new Error('boom'), { code: 50000 }); };
  let err; try { await c.view.loadOlder(5); } catch (e) { err = { code: e.code }; } h.history = orig;
  const calls = n; const after = (await c.view.loadOlder(5)).length; await c.close();
  return () => ({ attempts: calls, error: err, revealedAfterRecovery: after });
});

await probe('late-attacher-gets-raw-append-instead-of-full-update', async (a) => {
  a.hub.firstAppendAsUpdate = 'never';
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1', 'input-codec-message-id': 'U1' });
  const st = { role: 'assistant', 'codec-message-id': 'A1', 'run-id': 'R', parent: 'U1', 'input-codec-message-id': 'U1', stream: 'true', status: 'streaming', 'stream-id': 't1' }; const c = { kind: 'text', id: 't1' };
  const s = await a.pub('ai-output', st, { data: '', codec: c }); await a.app(s, 'prefix ', st, c);
  const late = createClientSession({ client: await a.ctx.client('late'), channelName: a.ctx.channelName }); await late.connect();
  await a.app(s, 'middle ', st, c); await settle(10); await late.view.loadOlder(100); await a.app(s, 'end', st, c); await settle(10);
  const lv = text(late.view); await late.close();
  return () => ({ live: a.view(), lateAttacher: lv });
});
await probe('rolled-up-appends', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  const hc = a.hub.channel(a.ctx.channelName); const orig = hc._broadcast; const held = [];
  const st = { role: 'assistant', 'codec-message-id': 'A1', 'run-id': 'R', parent: 'U1', stream: 'true', status: 'streaming', 'stream-id': 't1' }; const c = { kind: 'text', id: 't1' };
  const s = await a.pub('ai-output', st, { data: '', codec: c }); await settle(5);
  hc._broadcast = function (make) { held.push(make); };
  await a.app(s, 'a', st, c); await a.app(s, 'b', st, c); await a.app(s, 'c', st, c); await a.app(s, '', { ...st, status: 'complete' }, c);
  hc._broadcast = orig; const last = held.at(-1);
  for (const att of hc.attachments) { const m = last(att); m.data = 'abc'; att.sink(m); }
  return () => ({ view: a.view() });
});
await probe('stream-left-open-at-run-end', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' }); await say(a, { parent: 'U1', textv: 'half', close: null });
  await a.pub('ai-run-end', { 'run-id': 'R', 'run-reason': 'error', 'error-code': '104008', 'error-message': 'x' });
  return () => ({ view: a.view(), runs: a.runs(), errors: a.errs });
});
await probe('raw-output-events-seen-by-a-tree-subscriber-across-a-supersede', async (a) => {
  const seen = []; a.client.tree.on('output', (e) => { for (const o of e.events) if (o.type === 'text-delta') seen.push(o.delta); if (e.events.length === 0 && e.inputs.length === 0) seen.push('<empty output event>'); });
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' });
  const s1 = await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S' }); await say(a, { step: 'S', serial: s1, parent: 'U1', cmid: 'A1', textv: 'dead', close: null });
  const s2 = await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S' }); await say(a, { step: 'S', serial: s2, parent: 'U1', cmid: 'A2', textv: 'good' });
  return () => ({ rawEvents: seen, view: a.view() });
});

await probe('suspend-after-run-end', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1', 'invocation-id': 'I1' }); await say(a, { parent: 'U1' });
  await a.pub('ai-run-end', { 'run-id': 'R', 'run-reason': 'complete', 'invocation-id': 'I1' }); await a.pub('ai-run-suspend', { 'run-id': 'R', 'invocation-id': 'I1' });
  return () => ({ runs: a.runs() });
});
await probe('unknown-run-reason-and-step-reason', async (a) => {
  await a.input('U1', 'Hello'); await a.pub('ai-run-start', { 'run-id': 'R', parent: 'U1' }); const s = await a.pub('ai-step-start', { 'run-id': 'R', 'step-id': 'S' });
  await a.pub('ai-step-end', { 'run-id': 'R', 'step-id': 'S', 'step-start-serial': s, 'step-reason': 'weird' }); await a.pub('ai-run-end', { 'run-id': 'R', 'run-reason': 'timeout' });
  return () => ({ runs: a.runs(), errors: a.errs });
});
fs.writeFileSync(process.argv[2], JSON.stringify(results, null, 1) + '\n');
process.exit(0);

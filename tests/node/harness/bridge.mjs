// node bridge.mjs: the unmodified JavaScript SDK, driven by lines of JSON on stdin and stdout. tests/wire/bridge.py drives it.
//
// The channel's truth is the driver: it delivers messages as its channel delivered them, and what a client here publishes is
// asked of it. One process serves many tests: each works in a session of its own, with its own channels and clients.
//
// Lines to this process
//   {"session", "ref", "op", ...}          a request; see below
//   {"ask", "result" | "error"}            the answer to an event that asks; error: {message, code?, statusCode?}
// Lines from it
//   {"ref", "result" | "error"}            the reply to a request; error: {message, code?, statusCode?, stack}
//   {"session", "ask", "event", ...}       asks:
//       publish  {channel, clientId, messages}                                  -> {serials}
//       append   {channel, clientId, message: {serial, data, extras}}           -> {versionSerial}
//       update   {channel, clientId, message: {serial, data, extras}}           -> {versionSerial}
//     of a channel on which a scenario is played
//       quiet    {channel}                                                      -> anything, once all that is published so far
//                                                                                  has been delivered
//     and of channels with `readers: "each"`
//       attach   {channel, clientId, attachment}                                -> anything
//       detach   {channel, attachment}                                          -> anything
//       history  {channel, attachment, untilAttach, limit, cursor}              -> {items, next?}: newest first, the latest
//                version of each; cursor is the `next` of the page before, or null
//   {"event": "unhandled", "error"}        a promise rejected here and nobody looked
//
// A message is what the client library hands to a subscriber: {name?, data?, extras?, serial, version: {serial, timestamp?},
// action: "message.create" | "message.append" | "message.update" | "message.delete", timestamp, clientId?}.
//
// Requests
//   open      {channel, readers, firstAppendAsUpdate}
//             readers "shared" (default): one stream of deliveries for all; this process aggregates them for history and late
//             joiners, and turns a client's first append into a full update: of messages it did not see created
//             ("inflight-only", default), of all ("always") or of none ("never").
//             readers "each": every client gets what is delivered to its attachment, as it is, and asks for its history.
//   deliver   {channel, messages, to?: [attachment], views?: [client]}  -> {views: {client: [view after each message]}}
//   client    {client, channel, clientId, codec: "ui" | "tiny", historyPageSize?, endpoint?: {port}}   makes and connects one;
//             with `endpoint`, over the real `ably` client and mini-ably-server.mjs
//   view      {client, unlike?: digest}     -> view, once nothing is under way; with `unlike`, waits until it has another digest
//   load_older {client, limit}              -> view
//   send      {client, <input>, options?}   -> run; <input>: text | message | inputs: [event | {factory, args}]
//   edit      {client, target, <input>, options?} -> run
//   regenerate {client, target, options?}   -> run
//   run       {run}                         -> run, as it is now
//   started   {run}                         -> run, once it has started
//   steer     {run, <input>}                -> {steer, serial}, once published
//   outcome   {steer}                       -> {consumed, ...}, once known
//   cancel    {run} | {client, runId}
//   select    {client, target, index?}      -> {index, count}; of the branches at a message, after selecting one
//   lose_continuity {client}                as after a re-attach without it
//   close     {client}
//   scenario  {name, mode?, observer?, channel?} -> {published, history, checks, notes, result, clients: [{clientId,
//             connectionId, isClient, seen: [{deliver: message, view?} | {page: [message]}]}]}
//             one of scenarios.mjs, agent and clients, with counted ids. On a hub of its own, with `mode` for
//             firstAppendAsUpdate and, if asked for, a client "observer" that only watches; or on an open channel.
//   end       {}                            ends the session and its clients
//
// view: {messages: [{codecMessageId, message}], runs, steps: {runId: [step]}, hasOlder, errors, digest}
// run:  {run, runId, status, error?, inputCodecMessageId, inputEventId, invocation}
import crypto from 'node:crypto';
import readline from 'node:readline';
import * as Ably from 'ably';
import { createClientSession as createCoreClientSession } from '@ably/ai-transport';
import { createClientSession, createUIMessageCodec } from '@ably/ai-transport/vercel';
import { tiny } from './codecs.mjs';
import { FakeRealtime } from './fake-realtime.mjs';
import { Ctx, countedUuids, plainError, shown } from './lib.mjs';
import { Recorder } from './recorder.mjs';
import { RemoteHub } from './remote.mjs';
import { scenarios } from './scenarios.mjs';

const KEY = 'app.key1:secretsecretsecret';
const codecs = { ui: createUIMessageCodec(), tiny };
const write = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);
for (const level of ['log', 'info', 'debug']) console[level] = console.error; // stdout is ours
process.on('unhandledRejection', (e) => write({ event: 'unhandled', error: { ...plainError(e), stack: e?.stack } }));
const immediate = () => new Promise((r) => setImmediate(r));

let asked = 0;
const asks = new Map();
let last = Promise.resolve(); // scenarios, one after the other

class Session {
  constructor(number) {
    this.number = number;
    this.clients = new Map(); this.runs = new Map(); this.steers = new Map();
    this.hub = new RemoteHub((event, body) => new Promise((resolve, reject) => {
      const ask = ++asked;
      asks.set(ask, { resolve, reject });
      write({ session: this.number, ask, event, ...body });
    }));
  }
  client(name) { return found(this.clients, name, 'client'); }
  async settled() {
    for (let calm = 0; calm < 30; calm++) {
      await immediate();
      for (const { realtime } of this.clients.values()) if (realtime.idle === false) calm = 0;
    }
  }
  view(name) {
    const c = this.client(name);
    const steps = {};
    for (const runId of c.runIds) steps[runId] = c.session.tree.getRunNode(runId)?.steps ?? [];
    const view = { ...shown(c.session), steps, errors: [...c.errors] };
    return { ...view, digest: crypto.createHash('sha256').update(JSON.stringify(view)).digest('hex') };
  }
  keepRun(run) {
    run.started?.catch(() => {}); // a run may end without having started, and nobody need ask
    const name = `run-${this.runs.size + 1}`;
    this.runs.set(name, run);
    return this.run(name);
  }
  run(name) {
    const run = found(this.runs, name, 'run');
    return { run: name, runId: run.runId, status: run.status, ...(run.error ? { error: plainError(run.error) } : {}), inputCodecMessageId: run.inputCodecMessageId, inputEventId: run.inputEventId, invocation: run.toInvocation().toJSON() };
  }
}
const found = (map, name, what) => { if (!map.has(name)) throw new Error(`there is no ${what} ${name}`); return map.get(name); };

const input = (codec, { text, message, inputs }) => {
  if (inputs) return inputs.map((i) => (i.factory ? codec[i.factory](...i.args) : i));
  if (message) return codec.createUserMessage(message);
  if (codec === tiny) return tiny.createUserMessage({ text });
  return codec.createUserMessage({ id: crypto.randomUUID(), role: 'user', parts: [{ type: 'text', text }] });
};

const ops = {
  open: (s, { channel, ...options }) => s.hub.open(channel, options),
  async deliver(s, { channel, messages, to, views = [] }) {
    const out = Object.fromEntries(views.map((name) => [name, []]));
    for (const message of messages) {
      s.hub.channel(channel).deliver(message, to);
      if (views.length) { await s.settled(); for (const name of views) out[name].push(s.view(name)); }
    }
    return { views: out };
  },
  async client(s, { client: name, channel, clientId, codec = 'ui', historyPageSize, endpoint }) {
    if (s.clients.has(name)) throw new Error(`there is a client ${name} already`);
    const realtime = endpoint
      ? new Ably.Realtime({ key: KEY, clientId, endpoint: 'localhost', port: endpoint.port, tls: false, useBinaryProtocol: false, logLevel: 0 })
      : new FakeRealtime(s.hub, { clientId });
    const options = { client: realtime, channelName: channel, ...(historyPageSize ? { historyPageSize } : {}) };
    const session = codec === 'ui' ? createClientSession(options) : createCoreClientSession({ ...options, codec: found(new Map(Object.entries(codecs)), codec, 'codec') });
    const c = { realtime, session, channel, codec: codecs[codec], errors: [], runIds: new Set() };
    session.on('error', (e) => c.errors.push(plainError(e)));
    session.tree.on('run', (e) => c.runIds.add(e.runId));
    s.clients.set(name, c);
    await session.connect();
  },
  async view(s, { client, unlike }) {
    for (;;) {
      const { view, tree } = s.client(client).session;
      const offs = []; const update = new Promise((r) => { offs.push(view.on('update', r), tree.on('update', r), tree.on('run', r)); });
      try {
        await s.settled();
        const seen = s.view(client);
        if (seen.digest !== unlike) return seen;
        await update;
      } finally { for (const off of offs) off(); }
    }
  },
  async load_older(s, { client, limit }) { await s.client(client).session.view.loadOlder(limit); await s.settled(); return s.view(client); },
  async send(s, { client, options, ...rest }) { const c = s.client(client); return s.keepRun(await c.session.view.send(input(c.codec, rest), options)); },
  async edit(s, { client, target, options, ...rest }) { const c = s.client(client); return s.keepRun(await c.session.view.edit(target, input(c.codec, rest), options)); },
  async regenerate(s, { client, target, options }) { return s.keepRun(await s.client(client).session.view.regenerate(target, options)); },
  run: (s, { run }) => s.run(run),
  async started(s, { run }) { await found(s.runs, run, 'run').started; return s.run(run); },
  async steer(s, { run, codec = 'ui', ...rest }) {
    const { published, outcome } = found(s.runs, run, 'run').steer([input(codecs[codec], rest)].flat()[0]);
    outcome.catch(() => {});
    const { serial } = await published;
    const steer = `steer-${s.steers.size + 1}`;
    s.steers.set(steer, outcome);
    return { steer, serial };
  },
  outcome: (s, { steer }) => found(s.steers, steer, 'steer'),
  cancel: (s, { run, client, runId }) => (run ? found(s.runs, run, 'run').cancel() : s.client(client).session.cancel(runId)),
  select(s, { client, target, index }) {
    const branch = () => s.client(client).session.view.branchSelection(target);
    if (index !== undefined) branch().select(index);
    return { index: branch().index, count: branch().siblings.length };
  },
  lose_continuity(s, { client }) { const c = s.client(client); c.realtime.channels.get(c.channel)._loseContinuity(); },
  async close(s, { client }) {
    const c = s.client(client);
    s.clients.delete(client);
    await c.session.close(); c.realtime.close();
  },
  async scenario(s, args) {
    const mine = last.then(() => scenario(s, args));
    last = mine.catch(() => {});
    return mine;
  },
  async end(s) {
    for (const name of [...s.clients.keys()]) await ops.close(s, { client: name }).catch(() => {});
    sessions.delete(s.number);
  },
};

async function scenario(s, { name, mode = 'inflight-only', observer = false, channel }) {
  const fn = found(new Map(Object.entries(scenarios)), name, 'scenario');
  const ctx = channel === undefined ? new Ctx(name, { hubOptions: { firstAppendAsUpdate: mode } }) : new Ctx(name, { hub: s.hub, channelName: channel });
  const before = ctx.hub.trace.length;
  ctx.recorder = new Recorder();
  if (observer) {
    const watcher = new FakeRealtime(ctx.hub, { clientId: 'observer', connectionId: 'observer', recorder: ctx.recorder });
    const options = { client: watcher, channelName: ctx.channelName };
    const session = name === 'custom-codec' ? createCoreClientSession({ ...options, codec: tiny }) : createClientSession(options);
    ctx.recorder.session(watcher, session);
    await session.connect();
    ctx.clients.push(watcher);
  }
  let result = {};
  const quiet = channel === undefined ? undefined : () => s.hub.ask('quiet', { channel });
  try { result = (await countedUuids(() => fn(ctx), quiet)) ?? {}; } catch (e) { ctx.check('scenario threw', false, `${e.code ?? ''} ${e.stack}`); }
  await ctx.done();
  return { published: ctx.hub.trace.slice(before), history: ctx.history(), checks: ctx.checks, notes: ctx.notes, result, clients: ctx.recorder.clients() };
}

const sessions = new Map();
async function handle(line) {
  const request = JSON.parse(line);
  if (request.ask !== undefined) {
    const { resolve, reject } = asks.get(request.ask);
    asks.delete(request.ask);
    const { error } = request;
    if (error) reject(new Ably.ErrorInfo(error.message, error.code ?? 50000, error.statusCode ?? 500)); else resolve(request.result);
    return;
  }
  const { session, ref, op, ...args } = request;
  try {
    if (!sessions.has(session)) sessions.set(session, new Session(session));
    if (!Object.hasOwn(ops, op)) throw new Error(`there is no op ${op}`);
    write({ ref, result: (await ops[op](sessions.get(session), args)) ?? null });
  } catch (e) { write({ ref, error: { ...plainError(e), stack: e?.stack } }); }
}
readline.createInterface({ input: process.stdin }).on('line', handle).on('close', () => process.exit(0));

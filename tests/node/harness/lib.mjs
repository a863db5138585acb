// Shared scaffolding: counted ids, scenario contexts, goldens.
import { AsyncLocalStorage } from 'node:async_hooks';
import { Hub } from './hub.mjs';
import { FakeRealtime } from './fake-realtime.mjs';

// crypto.randomUUID counts inside of countedUuids and everything it sets off, so that traces are reproducible.
const counters = new AsyncLocalStorage();
const randomUUID = globalThis.crypto.randomUUID.bind(globalThis.crypto);
Object.defineProperty(globalThis.crypto, 'randomUUID', {
  value: () => {
    const counter = counters.getStore();
    return counter ? `00000000-0000-4000-8000-${String(++counter.n).padStart(12, '0')}` : randomUUID();
  },
});
/** quiet: a promise that everything published so far is delivered, where the channel is not in this process. */
export const countedUuids = (fn, quiet = async () => {}) => counters.run({ n: 0, quiet }, fn);

export const sleep = (ms = 0) => new Promise((r) => setTimeout(r, ms));
export const settle = async (n = 30) => { await counters.getStore()?.quiet(); for (let i = 0; i < n; i++) await new Promise((r) => setImmediate(r)); };
export async function until(fn, ms = 4000, what = 'condition') {
  const t = Date.now();
  while (!fn()) { if (Date.now() - t > ms) throw new Error(`timed out: ${what}`); await sleep(2); }
}

export class Ctx {
  /** transport: 'fake' on `hub` (a new one by default), or 'ws' through `server`. */
  constructor(name, { transport = 'fake', server, hubOptions, hub, channelName = 'conversations:golden' } = {}) {
    this.name = name; this.transport = transport; this.server = server; this.checks = []; this.notes = [];
    this.hub = hub ?? (server ? server.resetHub() : new Hub(hubOptions));
    this.clients = [];
    this.channelName = channelName;
  }
  async client(clientId) {
    if (this.transport === 'fake') { const c = new FakeRealtime(this.hub, { clientId, recorder: this.recorder }); this.clients.push(c); return c; }
    const c = await this.server.connect(clientId); this.clients.push(c); return c;
  }
  check(label, ok, detail) { this.checks.push({ label, ok: Boolean(ok), ...(ok ? {} : { detail }) }); }
  note(s) { this.notes.push(s); }
  async done() { for (const c of this.clients) c.close(); await settle(3); }
  history() { return this.hub.channel(this.channelName).history({ limit: 10000 }).items; }
}

/** What a client shows, as JSON. */
export const shown = (session) => ({ messages: msgs(session.view), runs: session.view.runs().map(plain), hasOlder: session.view.hasOlder() });
const plain = (run) => ({ ...JSON.parse(JSON.stringify(run)), ...(run.error ? { error: plainError(run.error) } : {}) });
export const plainError = (e) => ({ code: e?.code, statusCode: e?.statusCode, message: e?.message ?? String(e) });

export const msgs = (view) => view.getMessages().map(({ codecMessageId, message }) => ({ codecMessageId, message: JSON.parse(JSON.stringify(message)) }));
export const text = (view) => view.getMessages().map(({ message }) => `${message.role}:${(message.parts ?? []).filter((p) => p.type === 'text').map((p) => p.text).join('|')}`);

/** What a golden trace holds. */
export const golden = (ctx, extra = {}) => ({
  scenario: ctx.name,
  sdk: '@ably/ai-transport 0.8.0',
  channel: ctx.channelName,
  note: 'published = exact arguments handed to the channel (publish/append/update), in order, with the serials the channel returned. history_newest_first = channel state afterwards.',
  published: ctx.hub.trace,
  history_newest_first: ctx.history(),
  ...extra,
  checks: ctx.checks,
});

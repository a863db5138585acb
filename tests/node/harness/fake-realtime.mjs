// The minimal surface of Ably.Realtime that @ably/ai-transport 0.8.0 touches, over the in-memory hub.
import * as Ably from 'ably';

let conn = 0;
const later = () => new Promise((r) => setImmediate(r));
const strip = (o) => Object.fromEntries(Object.entries(o).filter(([, v]) => v !== undefined));

export class FakeRealtime {
  /**
   * hub: where channels are, see hub.mjs and remote.mjs.
   * connectionId: the next of this process by default.
   * recorder: told what this client is given, see recorder.mjs.
   */
  constructor(hub, { clientId, connectionId, recorder } = {}) {
    this.hub = hub;
    this.options = { clientId };                 // SDK merges `agents` into this
    this.auth = { clientId };                    // SDK (client side) reads clientId
    this.connectionId = connectionId ?? `conn${++conn}`;
    this._channels = new Map();
    this.recorder = recorder;
    this.channels = {
      get: (name, options) => {
        let c = this._channels.get(name);
        if (!c) { c = new FakeChannel(this, name, options); this._channels.set(name, c); }
        return c;
      },
    };
  }
  /** Nothing is waiting to be handed to a listener. */
  get idle() { return [...this._channels.values()].every((c) => c._queue.length === 0 && !c._pumping); }
  close() { for (const c of this._channels.values()) c._drop(); }
}

class FakeChannel {
  constructor(client, name, options) {
    this.client = client; this.name = name; this.options = options;
    this.state = 'initialized';
    this._stateListeners = new Set();
    this._listeners = new Set();
    this._hub = client.hub.channel(name);
    this._queue = [];
    this._presenceListeners = new Set();
    const self = this;
    this.presence = {
      enter: async (data) => { await self.attach(); self._hub.setPresence('enter', self._pub(), data); },
      update: async (data) => { await self.attach(); self._hub.setPresence('update', self._pub(), data); },
      leave: async (data) => { self._hub.setPresence('leave', self._pub(), data); },
      get: async () => { await self.attach(); return [...self._hub.presence.values()]; },
      subscribe: async (cb) => { self._presenceListeners.add(cb); await self.attach(); },
      unsubscribe: (cb) => { if (cb) self._presenceListeners.delete(cb); else self._presenceListeners.clear(); },
    };
  }
  _pub() { return { clientId: this.client.auth.clientId, connectionId: this.client.connectionId }; }
  on(cb) { this._stateListeners.add(cb); }
  off(cb) { if (cb) this._stateListeners.delete(cb); else this._stateListeners.clear(); }
  _setState(current, extra = {}) {
    const previous = this.state; this.state = current;
    for (const cb of [...this._stateListeners]) cb(strip({ previous, current, ...extra }));
  }
  /** Test hook: simulate a discontinuity (re-attach with resumed:false). */
  _loseContinuity() { for (const cb of [...this._stateListeners]) cb({ previous: 'attached', current: 'attached', resumed: false }); }
  _drop() { if (this._att) { this._hub.detach(this._att); this._att = undefined; } }

  async attach() {
    if (this.state === 'attached') return null;
    if (this._attaching) return this._attaching;
    this._attaching = (async () => {
      this._setState('attaching');
      await later();
      this._att = await this._hub.attach((m) => this._enqueue(m), this.client);
      this._att.presenceSink = (m) => { for (const cb of this._presenceListeners) cb(m); };
      this._setState('attached', { resumed: false, hasBacklog: false });
      this._attaching = undefined;
      return null;
    })();
    return this._attaching;
  }
  async detach() { this._drop(); await later(); this._setState('detached'); }

  _enqueue(m) {
    this._queue.push(m);
    if (!this._pumping) { this._pumping = true; setImmediate(() => this._pump()); }
  }
  _pump() {
    while (this._queue.length > 0) {
      const m = this._queue.shift();
      for (const l of [...this._listeners]) l(m);
      this.client.recorder?.delivered(this.client, m);
    }
    this._pumping = false;
  }
  async subscribe(listener) { this._listeners.add(listener); return this.attach(); }
  unsubscribe(listener) { if (listener) this._listeners.delete(listener); else this._listeners.clear(); }

  async publish(arg) {
    const list = Array.isArray(arg) ? arg : [arg];
    // Like the real client: only string / binary / null / undefined / object / array payloads are allowed.
    for (const m of list) if (m.data !== null && !['string', 'undefined', 'object'].includes(typeof m.data)) throw new Ably.ErrorInfo('Data type is unsupported', 40013, 400);
    const snapshot = list.map((m) => JSON.parse(JSON.stringify(m)));
    const gate = this._gate = (this._gate ?? Promise.resolve()).then(later);
    await gate;
    try { return await this._hub.publish(snapshot, this._pub()); } catch (e) { throw toErr(e); }
  }
  async _mutate(kind, m) {
    if (!m.serial) throw new Ably.ErrorInfo('This message lacks a serial', 40003, 400);
    const snapshot = JSON.parse(JSON.stringify(m));
    const gate = this._gate = (this._gate ?? Promise.resolve()).then(later);
    await gate;
    try { return await this._hub.mutate(kind, snapshot, this._pub()); } catch (e) { throw toErr(e); }
  }
  appendMessage(m) { return this._mutate('append', m); }
  updateMessage(m) { return this._mutate('update', m); }

  async history(params) {
    if (params?.untilAttach && this.state !== 'attached') throw new Ably.ErrorInfo('untilAttach needs an attached channel', 40000, 400);
    const until = params?.untilAttach ? this._att.attachSerial : undefined;
    const attachment = this._att;
    const limit = params?.limit ?? 100;
    const page = async (cursor) => {
      const { items, next } = await this._hub.history({ limit, until, cursor, attachment });
      this.client.recorder?.paged(this.client, items);
      return { items, hasNext: () => next !== undefined, isLast: () => next === undefined, next: async () => { await later(); return next === undefined ? null : page(next); } };
    };
    await later();
    return page(undefined);
  }
}
const toErr = (e) => (e instanceof Ably.ErrorInfo ? e : new Ably.ErrorInfo(e.message, e.code ?? 50000, e.statusCode ?? 500));

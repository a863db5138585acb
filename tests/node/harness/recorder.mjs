// What each client of a scenario was given, in order, and what it showed after each of them.
import { clone } from './hub.mjs';
import { shown } from './lib.mjs';

export class Recorder {
  constructor() { this._entries = new Map(); }
  _entry(client) {
    let e = this._entries.get(client);
    if (!e) { e = { clientId: client.auth.clientId, connectionId: client.connectionId, session: undefined, seen: [] }; this._entries.set(client, e); }
    return e;
  }
  /** The client session of a client; an agent has none. */
  session(client, session) { this._entry(client).session = session; }
  delivered(client, message) {
    const e = this._entry(client);
    e.seen.push({ deliver: clone(message), ...(e.session ? { view: shown(e.session) } : {}) });
  }
  /** A page of history, newest first. */
  paged(client, items) { this._entry(client).seen.push({ page: clone(items) }); }
  clients() { return [...this._entries.values()].map(({ session, ...rest }) => ({ ...rest, isClient: session !== undefined })); }
}

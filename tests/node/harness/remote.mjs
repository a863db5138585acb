// Channels whose truth is somebody else: what is published is asked for, what is delivered is dictated.
import { Hub, HubChannel, clone } from './hub.mjs';

export class RemoteHub extends Hub {
  /** ask(event, body): a promise of the answer. */
  constructor(ask) { super(); this.ask = ask; this.attachmentNumber = 0; }
  open(name, options) {
    if (this.channels.has(name)) throw new Error(`channel ${name} is open already`);
    this.channels.set(name, new RemoteChannel(this, name, options));
  }
  channel(name) {
    const c = this.channels.get(name);
    if (!c) throw new Error(`channel ${name} is not open`);
    return c;
  }
}

class RemoteChannel extends HubChannel {
  constructor(hub, name, { readers = 'shared', firstAppendAsUpdate = 'inflight-only' } = {}) {
    super(hub, name);
    if (!['shared', 'each'].includes(readers)) throw new Error(`readers: ${readers}`);
    if (!['inflight-only', 'always', 'never'].includes(firstAppendAsUpdate)) throw new Error(`firstAppendAsUpdate: ${firstAppendAsUpdate}`);
    this.readers = readers; this.firstAppendAsUpdate = firstAppendAsUpdate;
    this.lastSerial = '';
  }

  async attach(sink, client) {
    const att = { sink, attachSerial: this.lastSerial, seen: new Set(), channel: this, number: ++this.hub.attachmentNumber };
    this.attachments.add(att);
    if (this.readers === 'each') await this.hub.ask('attach', { channel: this.name, attachment: att.number, clientId: client.auth.clientId });
    return att;
  }
  detach(att) {
    if (this.attachments.delete(att) && this.readers === 'each') this.hub.ask('detach', { channel: this.name, attachment: att.number }).catch(() => {});
  }

  async _ask(op, body, publisher, made) {
    const entry = { op, by: publisher.clientId ?? null, ...clone(body) };
    this.hub.trace.push(entry);
    try {
      const fault = this.hub.takeFault({ op, channel: this.name, ...body });
      if (fault) throw fault;
      const answer = await this.hub.ask(op, { channel: this.name, clientId: publisher.clientId, ...body });
      if (answer?.[made] === undefined) throw new Error(`the answer to ${op} has no ${made}`);
      entry[made] = answer[made];
      return { [made]: answer[made] };
    } catch (e) { entry.error = e.code ?? 50000; throw e; }
  }
  publish(messages, publisher) { return this._ask('publish', { messages }, publisher, 'serials'); }
  mutate(kind, message, publisher) { return this._ask(kind, { message }, publisher, 'versionSerial'); }

  /** message: what a subscriber gets. to: numbers of attachments; they get it as it is. */
  deliver(message, to) {
    const kept = this.readers === 'shared' ? this._keep(message) : undefined;
    for (const att of this.attachments) {
      if (to && !to.includes(att.number)) continue;
      const full = !to && message.action === 'message.append' && this._firstAppendHere(att, message.serial, this.firstAppendAsUpdate);
      att.seen.add(message.serial);
      att.sink(clone(full ? kept : message));
    }
    for (const s of [message.serial, message.version?.serial]) if (s !== undefined && s > this.lastSerial) this.lastSerial = s;
  }

  /** For history and late joiners: the aggregate. A version that is no news changes nothing. */
  _keep(message) {
    const old = this.bySerial.get(message.serial);
    if (old && message.version.serial <= old.version.serial) return old;
    if (message.action === 'message.append' && !old) throw new Error(`append to a message that was not delivered: ${message.serial}`);
    const rec = { ...old, ...clone(message), ...(old ? { timestamp: old.timestamp, action: message.action === 'message.delete' ? message.action : 'message.update' } : {}) };
    if (message.action === 'message.append') { rec.data = `${old.data ?? ''}${message.data ?? ''}`; rec.extras = clone(message.extras ?? old.extras); }
    if (old) Object.assign(old, rec); else this.bySerial.set(rec.serial, rec);
    if (!old && !rec.extras?.ephemeral) { this.records.push(rec); this.records.sort((a, b) => (a.serial < b.serial ? -1 : 1)); }
    return this.bySerial.get(message.serial);
  }

  history({ limit, until, cursor, attachment } = {}) {
    if (this.readers === 'shared') return super.history({ limit, until, cursor });
    if (!attachment) return { items: [] }; // of a scenario's end, not of a client
    return this.hub.ask('history', { channel: this.name, attachment: attachment.number, untilAttach: until !== undefined, limit, cursor: cursor ?? null });
  }
}

// Reads conversations (JSON, standard input): {log, joins}, where a client joins before the row that each of `joins`
// names and reads all history at once. Says what the SDK's clients show before each row and at the end.
import { createClientSession } from '@ably/ai-transport/vercel';

let text = '';
for await (const piece of process.stdin) text += piece;

const actions = { create: 'message.create', append: 'message.append', update: 'message.update' };
const toMessage = (row) => ({
  name: row.name, data: row.data, extras: row.extras, serial: row.serial, action: actions[row.action],
  version: { serial: row.version }, timestamp: row.timestamp ?? 0, clientId: row.client_id, id: row.serial,
});
const whole = (log, upto, serial) => {
  const rows = log.slice(0, upto).filter((row) => row.serial === serial);
  let { data } = rows[0];
  for (const row of rows.slice(1)) data = row.action === 'append' ? data + row.data : row.data;
  const last = rows.at(-1);
  return { ...rows[0], data, extras: last.extras, version: last.version, timestamp: last.timestamp, action: rows.length === 1 ? 'create' : 'update' };
};

// The members of a channel that the SDK's client touches: see surface.json of the harness.
class Channel {
  constructor(log, position) { this.log = log; this.start = this.position = position; this.name = 'c'; this.state = 'initialized'; this.callbacks = []; this.met = new Set(); }
  on() {} off() {} unsubscribe() {}
  async subscribe(callback) { this.callbacks.push(callback); this.state = 'attached'; }
  async attach() { this.state = 'attached'; }
  async detach() {}
  get presence() { return {}; }
  get object() { return {}; }
  deliver(place) {
    let row = this.log[place];
    if (row.action !== 'create' && !this.met.has(row.serial)) row = { ...whole(this.log, place + 1, row.serial), action: 'update' };
    this.met.add(row.serial); this.position = place + 1;
    for (const callback of this.callbacks) callback(toMessage(row));
  }
  async history({ limit }) {
    const serials = this.log.slice(0, this.start).filter((row) => row.action === 'create').map((row) => row.serial).reverse();
    const items = serials.map((serial) => toMessage(whole(this.log, this.position, serial)));
    const page = (from) => ({ items: items.slice(from, from + limit), hasNext: () => from + limit < items.length, next: async () => page(from + limit) });
    return page(0);
  }
}

const state = ({ view }) => ({
  messages: view.getMessages().map(({ codecMessageId, message }) => [codecMessageId, message]),
  runs: view.runs().map((run) => [run.runId, run.status, run.clientId, run.invocationId, run.steps.map((step) => [step.stepId, step.status, step.attemptCount, step.stepClientId ?? null])]),
});

const play = async ({ log, joins }) => {
  const readers = [];
  const states = [];
  for (let row = 0; row <= log.length; row++) {
    while (readers.length < joins.length && joins[readers.length] === row) {
      const channel = new Channel(log, row);
      const client = { options: {}, auth: { clientId: 'reader' }, channels: { get: () => channel }, close() {} };
      const session = createClientSession({ client, channelName: 'c' });
      await session.connect();
      if (row > 0) await session.view.loadOlder(10_000);
      readers.push([session, channel]);
    }
    states.push(structuredClone(readers.map(([session]) => state(session)))); // messages are changed in place
    if (row < log.length) for (const [, channel] of readers) channel.deliver(row);
  }
  for (const [session] of readers) await session.close();
  return states;
};

const shown = [];
for (const conversation of JSON.parse(text)) shown.push(await play(conversation));
process.stdout.write(JSON.stringify(shown), () => process.exit(0));

// A minimal custom codec through defineCodec.
import { defineCodec, strField } from '@ably/ai-transport';

export const tiny = defineCodec()({
  reducer: {
    init: () => ({ messages: [] }),
    fold: (st, ev, meta) => {
      const id = meta.messageId; let e = st.messages.find((m) => m.codecMessageId === id);
      if (ev.direction === 'input') { if (ev.event.kind === 'user-message') st.messages.push({ codecMessageId: id, message: { role: 'user', text: ev.event.message.text } }); return st; }
      if (!e) { e = { codecMessageId: id, message: { role: 'assistant', text: '' } }; st.messages.push(e); }
      if (ev.event.type === 'tok') e.message.text += ev.event.t;
      return st;
    },
    getMessages: (st) => st.messages,
  },
  output: ({ event, stream }) => [
    stream('txt', { streamId: (c) => c.sid ?? 's', fields: [strField('lang')], start: { type: 'begin' }, delta: { type: 'tok', field: 't' }, end: { type: 'stop' } }),
    event('note', { fields: [strField('level')], data: { encode: (c) => ({ body: c.body }), decode: (d) => ({ body: d.body }) } }),
  ],
  input: ({ event, batch }) => [
    batch('user-message', { explode: (i) => [{ type: 'text', text: i.message.text }], partTypeOf: (p) => p.type, parts: (p) => [p('text', { data: { encode: (x) => x.text, decode: (d) => ({ text: d }) } })], assemble: (part) => ({ message: { text: part.text } }) }),
    event('regenerate', { wireOnly: true }),
  ],
  factories: ({ createUserMessage, createRegenerate }) => ({ createUserMessage, createRegenerate }),
});

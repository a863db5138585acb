// Reads lists of deliveries (JSON, standard input); says after each delivery what the SDK's UI codec makes of its list.
import { createUIMessageCodec } from '@ably/ai-transport/vercel';

let text = '';
for await (const piece of process.stdin) text += piece;
const shown = JSON.parse(text).map((deliveries) => {
  const codec = createUIMessageCodec();
  const decoder = codec.createDecoder();
  let projection = codec.init();
  return deliveries.map((delivery) => {
    const { inputs, outputs } = decoder.decode(delivery);
    const meta = { serial: delivery.serial, messageId: delivery.extras.ai.transport['codec-message-id'] };
    for (const event of inputs) projection = codec.fold(projection, { direction: 'input', event }, meta);
    for (const event of outputs) projection = codec.fold(projection, { direction: 'output', event }, meta);
    return JSON.parse(JSON.stringify(codec.getMessages(projection)));
  });
});
process.stdout.write(JSON.stringify(shown));

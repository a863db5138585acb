// node run.mjs fake|ws [--out DIR] [scenario...]
// Runs scenarios with the unmodified SDK, over the in-process channel in both delivery modes or over the real `ably` client
// and the endpoint, and says which of their checks hold. With --out (fake only) it writes their golden-*.json there; the ids
// of connections in them count over all scenarios, so only a run of all equals the stored traces.
import fs from 'node:fs';
import path from 'node:path';
import { Ctx, countedUuids, golden } from './lib.mjs';
import { scenarios } from './scenarios.mjs';

process.on('unhandledRejection', (e) => { console.log('  !! unhandledRejection', e?.code, e?.message); });
const [transport = 'fake', ...rest] = process.argv.slice(2);
const out = rest[0] === '--out' ? rest.splice(0, 2)[1] : undefined;
let server;
if (transport === 'ws') { const { startServer } = await import('./mini-ably-server.mjs'); server = await startServer(); }
let pass = 0, fail = 0;
for (const [name, fn] of Object.entries(scenarios)) {
  if (rest.length && !rest.includes(name)) continue;
  for (const mode of transport === 'fake' ? ['inflight-only', 'always'] : ['inflight-only']) {
    const ctx = new Ctx(name, { transport, server, hubOptions: { firstAppendAsUpdate: mode } });
    let extra = {};
    try { extra = (await countedUuids(() => fn(ctx))) ?? {}; } catch (e) { ctx.check('scenario threw', false, `${e.code ?? ''} ${e.stack}`); }
    await ctx.done();
    const bad = ctx.checks.filter((c) => !c.ok);
    pass += ctx.checks.length - bad.length; fail += bad.length;
    console.log(`${bad.length ? 'FAIL' : 'ok  '} ${name} [${mode}] ${ctx.checks.length - bad.length}/${ctx.checks.length}`);
    for (const b of bad) console.log('   x', b.label, JSON.stringify(b.detail, null, 0)?.slice(0, 1500) ?? b.detail);
    for (const n of ctx.notes) console.log('   .', n);
    if (out && mode === 'inflight-only') fs.writeFileSync(path.join(out, `golden-${name}.json`), JSON.stringify(golden(ctx, extra), null, 1) + '\n');
  }
}
console.log(`\n${pass} passed, ${fail} failed`);
await server?.close();
process.exit(fail ? 1 : 0);

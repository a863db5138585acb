// node resume.mjs: prints what it saw as JSON.
// Real `ably` client against the mini server: socket loss -> resume, lost resume state -> 104006, token auth.
import * as Ably from 'ably';
import { createAgentSession, createClientSession } from '@ably/ai-transport/vercel';
import { Invocation } from '@ably/ai-transport';
import { startServer } from './mini-ably-server.mjs';
import { until, sleep } from './lib.mjs';
const out = {};
const srv = await startServer();
const opt = (id, x = {}) => ({ ...(id ? { key: 'app.key1:secretsecretsecret', clientId: id } : {}), endpoint: 'localhost', port: srv.port, tls: false, useBinaryProtocol: false, logLevel: 0, disconnectedRetryTimeout: 200, ...x });
const ch = 'conversations:resume';
const viewer = new Ably.Realtime(opt('viewer')); const agentRt = new Ably.Realtime(opt('agent'));
const cs = createClientSession({ client: viewer, channelName: ch }); const as = createAgentSession({ client: agentRt, channelName: ch });
const errs = []; cs.on('error', (e) => errs.push(e.code)); const aerrs = []; as.on?.('error', (e) => aerrs.push(e.code));
const states = []; viewer.connection.on((c) => states.push(c.current));
await cs.connect(); await as.connect();
const run = await cs.view.send({ kind: 'user-message', message: { id: 'u1', role: 'user', parts: [{ type: 'text', text: 'hi' }] } }).catch((e) => { out.sendErr = e.message; });
const r = as.createRun(Invocation.fromJSON ? Invocation.fromJSON(run.toInvocation().toJSON()) : run.toInvocation());
await r.start();
let push; const stream = new ReadableStream({ start(c) { push = (x) => x === null ? c.close() : c.enqueue(x); } });
const piped = r.pipe(stream);
push({ type: 'start' }); push({ type: 'start-step' }); push({ type: 'text-start', id: 't' }); push({ type: 'text-delta', id: 't', delta: 'one ' });
const txt = () => cs.view.getMessages().map((m) => m.message.parts.filter((p) => p.type === 'text').map((p) => p.text).join('')).join('|');
await until(() => txt().includes('one'), 3000, 'one');
// 1. drop only the viewer socket, keep streaming during the gap
const viewerSocket = [...srv.wss.clients][0];
viewerSocket.terminate(); push({ type: 'text-delta', id: 't', delta: 'two ' }); await sleep(50); push({ type: 'text-delta', id: 't', delta: 'three ' });
await until(() => txt().includes('three'), 6000, 'gap replay');
out.viewer_resume = { text: txt(), sessionErrors: [...errs], states: [...states], resumes: srv.stats.resumes };
// 2. drop the agent socket with appends in flight
const agentSocket = [...srv.wss.clients].find((w) => w !== [...srv.wss.clients].at(-1)) ?? [...srv.wss.clients][0];
agentSocket.terminate(); push({ type: 'text-delta', id: 't', delta: 'four ' }); await sleep(600); push({ type: 'text-delta', id: 't', delta: 'five' });
push({ type: 'text-end', id: 't' }); push({ type: 'finish-step' }); push({ type: 'finish', finishReason: 'stop' }); push(null);
const res = await Promise.race([piped, sleep(8000).then(() => 'TIMEOUT')]); 
await r.end({ reason: 'complete' }).catch((e) => { out.endErr = [e.code, e.message]; });
await sleep(300);
out.agent_resume = { pipe: res?.reason ?? res, text: txt(), runs: cs.view.runs().map((x) => x.status), viewerErrors: [...errs], agentErrors: aerrs, resumes: srv.stats.resumes, abort: r.abortSignal?.aborted };
await cs.close(); await as.detach(); viewer.close(); agentRt.close();
// 3. token auth through authCallback with a signed TokenRequest
const issuer = new Ably.Rest({ key: 'app.key1:secretsecretsecret' });
const tok = new Ably.Realtime(opt(undefined, { authCallback: async (_p, cb) => { try { cb(null, await issuer.auth.createTokenRequest({ clientId: 'tok-user' })); } catch (e) { cb(e, null); } } }));
await new Promise((ok, no) => { tok.connection.once('connected', ok); tok.connection.once('failed', (e) => no(e.reason)); setTimeout(() => no(new Error('token connect timeout')), 4000); }).then(() => { out.token = { connectedAs: tok.auth.clientId }; }, (e) => { out.token = { failed: e.message }; });
const tcs = createClientSession({ client: tok, channelName: ch }); await tcs.connect(); await tcs.view.loadOlder(10);
out.token.history = tcs.view.getMessages().map((m) => m.message.role);
await tcs.close(); tok.close();
// 4. connection state forgotten by the server (1 ms window) but the channel log kept: re-attach by channelSerial
{
  const s2 = await startServer({ resumeWindowMs: 1 });
  const o2 = (id) => ({ ...opt(id), port: s2.port });
  const v2 = new Ably.Realtime(o2('v2')); const pubr = new Ably.Realtime(o2('p2'));
  const c2 = createClientSession({ client: v2, channelName: 'x' }); const e2 = []; c2.on('error', (e) => e2.push(e.code)); await c2.connect();
  const changes = []; v2.channels.get('x', { params: v2.channels.get('x').channelOptions?.params }).on((c) => changes.push([c.current, c.resumed]));
  const ids = [v2.connection.id];
  [...s2.wss.clients].at(0).terminate(); await sleep(100);
  await pubr.channels.get('x').publish({ name: 'ai-run-start', extras: { ai: { transport: { 'run-id': 'gap-run', 'run-client-id': '' } } } });
  await sleep(1500); ids.push(v2.connection.id);
  out.lostConnectionKeptLog = { changes, sameConnectionId: ids[0] === ids[1], sessionErrors: e2, sawGapRun: Boolean(c2.tree.getRun?.('gap-run') ?? c2.tree.run?.('gap-run') ?? c2.view.runs().length) };
  await c2.close(); v2.close(); pubr.close(); await s2.close();
}
out.restSeen = srv.stats.rest.map((s) => s.slice(0, 110)); out.lastConnectParams = Object.fromEntries(Object.entries(srv.stats.lastConnectParams).map(([k, v]) => [k, k === 'key' ? '…' : v]));
console.log(JSON.stringify(out, null, 1)); await srv.close(); process.exit(0);

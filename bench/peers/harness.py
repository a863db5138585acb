"""harness.py <peer> <bench> : one measurement in this process, one JSON line."""
import asyncio, gc, importlib, json, os, resource, sys, tempfile, time, warnings, logging
warnings.simplefilter("ignore"); logging.disable(logging.CRITICAL)
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import common
peer, bench = sys.argv[1], sys.argv[2]
def rss(): return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
async def timed(f, reps, budget=20.0):
    """median-friendly: list of seconds"""
    xs = []; t00 = time.perf_counter()
    for _ in range(reps):
        t = time.perf_counter(); await f(); xs.append(time.perf_counter() - t)
        if time.perf_counter() - t00 > budget: break
    return xs
def summ(xs, per=1):
    s = sorted(xs); return dict(n=len(xs), mean_us=round(sum(xs) / len(xs) / per * 1e6, 1), p50_us=round(s[len(s) // 2] / per * 1e6, 1), p99_us=round(s[min(len(s) - 1, int(len(s) * .99))] / per * 1e6, 1))
async def expect(f, model, tool):
    common.COUNTS.update(model=0, tool=0); r = await f(); got = dict(common.COUNTS)
    assert got == dict(model=model, tool=tool), f"work differs: {got} != model={model} tool={tool}"
    return r
async def main():
    ad = importlib.import_module("adapters." + peer).Adapter(); out = dict(peer=ad.name if hasattr(ad, "name") else peer, bench=bench)
    if getattr(ad, bench, ad) is None: print(json.dumps(dict(out, missing=True)), flush=True); return
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_TMP")) as tmp:
        await ad.setup(tmp); c = ad; rss0 = rss(); cpu0 = time.process_time(); w0 = time.perf_counter()
        if bench == "one_turn":
            assert await expect(c.one_turn, 1, 0) == common.ANSWER
            for _ in range(50): await c.one_turn()
            gc.collect(); cpu0 = time.process_time(); out.update(summ(await timed(c.one_turn, 1000, 5)))
        elif bench == "conv3":
            assert await expect(c.conv3, 6, 3) == common.ANSWER
            for _ in range(10): await c.conv3()
            gc.collect(); cpu0 = time.process_time(); out.update(summ(await timed(c.conv3, 300, 5)))
        elif bench == "fanout":
            assert await expect(lambda: c.fanout(100), 100, 0) == 100 * len(common.ANSWER)
            for _ in range(2): await c.fanout(100)
            gc.collect(); cpu0 = time.process_time(); out.update(summ(await timed(lambda: c.fanout(100), 30, 6)))
        elif bench == "persist":
            N = int(os.environ.get("SESSIONS", "1000")); assert await expect(lambda: c.conv3_persist("warm"), 6, 3) == common.ANSWER
            await c.checkpoint(); b0 = c.stored_bytes(); i = iter(range(10**9)); cpu0 = time.process_time(); w0 = time.perf_counter()
            xs = await timed(lambda: c.conv3_persist(f"s{next(i)}"), N, float(os.environ.get("BUDGET", "60"))); out.update(summ(xs)); out["cpu_us"] = round((time.process_time() - cpu0) / len(xs) * 1e6)
            await c.checkpoint(); out["bytes_per_session"] = round((c.stored_bytes() - b0) / len(xs))
        elif bench == "resume":
            N = int(os.environ.get("SESSIONS", "100")); i = iter(await c.suspend(N + 10))
            assert await expect(lambda: c.resume(next(i)), 1, 1) == common.ANSWER
            for _ in range(9): await c.resume(next(i))
            gc.collect(); cpu0 = time.process_time(); out.update(summ(await timed(lambda: c.resume(next(i)), N)))
        elif bench == "growth":
            marks = [10, 100, 1000]; ts = []; bts = {}; lat = {}; t00 = time.perf_counter()
            for _ in range(3): await c.chat_turn("warm")
            await c.checkpoint(); b0 = c.stored_bytes()
            for k in range(1, 1001):
                t = time.perf_counter(); await c.chat_turn("grow"); ts.append(time.perf_counter() - t)
                if k in marks: w = sorted(ts[-10:]); lat[k] = round(w[5] * 1e6); await c.checkpoint(); bts[k] = c.stored_bytes() - b0
                if time.perf_counter() - t00 > float(os.environ.get("BUDGET", "120")): w = sorted(ts[-10:]); lat[k] = round(w[5] * 1e6); await c.checkpoint(); bts[k] = c.stored_bytes() - b0; out["stopped_at"] = k; break
            out.update(turn_us=lat, stored=bts, total_s=round(sum(ts), 2))
        elif bench == "stream":
            n = 2000; assert await expect(lambda: c.stream(n), 1, 0) == n
            gc.collect(); cpu0 = time.process_time(); xs = await timed(lambda: c.stream(n), 10, 8); out.update(summ(xs, n)); base = await timed(lambda: c.stream(1), 20, 2); out["per_token_net_us"] = round((sorted(xs)[len(xs) // 2] - sorted(base)[len(base) // 2]) / (n - 1) * 1e6, 2)
        elif bench == "alloc":
            import tracemalloc
            for nm, f in (("one_turn", c.one_turn), ("conv3", c.conv3), ("fanout", c.fanout and (lambda: c.fanout(100)))):
                if f is None: continue
                for _ in range(3): await f()
                gc.collect(); tracemalloc.start(); a = tracemalloc.get_traced_memory()[0]; tracemalloc.reset_peak(); await f(); cur, pk = tracemalloc.get_traced_memory(); tracemalloc.stop(); out[nm + "_peak_kib"] = round((pk - a) / 1024, 1)
        out.update(cpu_s=round(time.process_time() - cpu0, 3), rss_setup_mb=round(rss0, 1), rss_end_mb=round(rss(), 1), peak_rss_mb=round(peak(), 1), load1=os.getloadavg()[0])
        await c.teardown()
    print(json.dumps(out), flush=True)
asyncio.run(main()); os._exit(0)

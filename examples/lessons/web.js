// web.js - what a lesson needs of an operating system (WASI preview 1), in a worker of the page or in Node.js: texts
// out, a clock, and files in memory. web.sh puts it into the page.
function run(bytes, lesson, numbers = []) {
  const files = new Map(), open = new Map(), text = { 1: "", 2: "" }, decoder = new TextDecoder(), OK = 0, BADF = 8, NOENT = 44;
  let memory, next = 4;
  const view = () => new DataView(memory.buffer), at = (p, n) => new Uint8Array(memory.buffer, p, n);
  const string = (p, n) => decoder.decode(at(p, n).slice()), args = ["lesson", lesson, ...numbers];
  const calls = {
    args_sizes_get: (count, size) => {
      view().setUint32(count, args.length, true);
      view().setUint32(size, args.join("").length + args.length, true);
      return OK;
    },
    args_get: (list, p) => {
      args.forEach((a, i) => {
        view().setUint32(list + 4 * i, p, true);
        for (const c of a + "\0") at(p++, 1)[0] = c.charCodeAt(0);
      });
      return OK;
    },
    environ_sizes_get: (count, size) => { view().setUint32(count, 0, true); view().setUint32(size, 0, true); return OK; },
    environ_get: () => OK,
    clock_time_get: (id, precision, p) => { view().setBigUint64(p, BigInt(Math.round(performance.now() * 1e6)), true); return OK; },
    proc_exit: status => { throw { status }; },
    random_get: (p, n) => { at(p, n).fill(4); return OK; },
    // Descriptor 3 is the only directory; 0 to 2 are terminals to nobody.
    fd_prestat_get: (fd, p) => { if (fd != 3) return BADF; view().setUint32(p, 0, true); view().setUint32(p + 4, 1, true); return OK; },
    fd_prestat_dir_name: (fd, p) => { at(p, 1)[0] = 46; return OK; },
    fd_fdstat_get: (fd, p) => {
      at(p, 24).fill(0);
      at(p, 1)[0] = fd == 3 ? 3 : 4;
      view().setBigUint64(p + 8, 0xffffffffn, true);
      view().setBigUint64(p + 16, 0xffffffffn, true);
      return OK;
    },
    fd_write: (fd, list, count, written) => {
      let all = 0;
      for (let i = 0; i < count; i++) {
        const part = string(view().getUint32(list + 8 * i, true), view().getUint32(list + 8 * i + 4, true));
        if (fd < 3) text[fd] += part;
        else files.set(open.get(fd), files.get(open.get(fd)) + part);
        all += view().getUint32(list + 8 * i + 4, true);
      }
      view().setUint32(written, all, true);
      return OK;
    },
    path_open: (fd, flags, p, n, create, rights, inherit, how, result) => {
      const name = string(p, n);
      if (!(create & 1) && !files.has(name)) return NOENT;
      if (create & 1) files.set(name, "");
      open.set(next, name);
      view().setUint32(result, next++, true);
      return OK;
    },
    path_filestat_get: () => NOENT,
    path_unlink_file: (fd, p, n) => files.delete(string(p, n)) ? OK : NOENT,
    path_rename: (fd, p, n, to, q, m) => { files.set(string(q, m), files.get(string(p, n))); files.delete(string(p, n)); return OK; },
    fd_close: () => OK,
  };
  const module = new WebAssembly.Module(bytes), imports = {};
  for (const i of WebAssembly.Module.imports(module)) imports[i.name] = calls[i.name] || (() => 52);       // not supported
  const instance = new WebAssembly.Instance(module, { wasi_snapshot_preview1: imports });
  memory = instance.exports.memory;
  let status = 0;
  try { instance.exports._start(); } catch (end) {
    if (end.status === undefined) { status = 1; text[2] += end; } else status = end.status;
  }
  return { status, out: text[1], err: text[2], svg: files.get("picture.svg") || "" };
}
if (typeof module != "undefined") module.exports = run;
else onmessage = ({ data }) => postMessage(run(data.wasm, data.lesson, data.numbers));

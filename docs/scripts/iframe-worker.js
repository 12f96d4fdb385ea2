// Search from a disk. A page of file:// may start no worker, so the search runs in a hidden frame
// of the page instead. On a server nothing of this is used.
if (location.protocol === "file:") {
  window.Worker = class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      // what the search says goes to whoever listens to this object
      this.inside.postMessage = (data) => {
        this.dispatchEvent(new MessageEvent("message", { data }));
      };
      const script = this.inside.document.createElement("script");
      script.src = url;
      // what is asked before the script is there waits for it
      this.ready = new Promise((done) => { script.onload = done; });
      this.inside.document.body.append(script);
    }

    async postMessage(data) {
      await this.ready;
      this.inside.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}

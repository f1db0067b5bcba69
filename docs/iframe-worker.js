// Search on pages that are opened from files, where browsers start no worker: its script runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.within = frame.contentWindow;
      this.within.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.within.document.createElement("script");
      this.loaded = new Promise((done) => { script.onload = done; });
      script.src = address;
      this.within.document.body.append(script);
    }

    postMessage(data) {
      this.loaded.then(() => this.within.dispatchEvent(new MessageEvent("message", { data })));
    }
  };

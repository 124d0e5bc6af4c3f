//! Fuzz targets: one function for each place where bytes from outside come in, with what must hold for every input.
//! No target decides what is right by a second parser of its own: it asks for round trips, bounds and typed errors.
//! Read `Target` first, then one target, such as `etcd.rs`.
//! `scripts/fuzz` lets libFuzzer drive the targets (`libfuzzer.rs`). `tests/corpora.rs` replays the inputs of `corpus/`.

#![forbid(unsafe_code)]

mod api;
mod block_pool;
mod choices;
mod etcd;
mod folder;
mod kv_messages;
mod model_files;
mod names;
mod node_calls;
mod reloaded;
mod template;
mod tokenizer;
mod traces;
mod wire;

use std::panic;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// The most that a target may take while it looks at one input, besides what it held before.
const PEAK_BYTES_MAX: usize = 64 << 20;
const PEAK_BYTES_FOR_EACH_BYTE: usize = 4;

static PANICS: AtomicUsize = AtomicUsize::new(0);

/// One function and its name, which is also that of its folder in `corpus/`.
#[derive(Debug)]
pub struct Target {
    pub name: &'static str,
    run: fn(&[u8]),
    panics: Panics,
}

/// What a panic in the code under test means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Panics {
    AreFaults,
    /// The library below panics in known places, and the code under test makes a typed error of it.
    AreCaught,
}

const fn target(name: &'static str, run: fn(&[u8])) -> Target {
    Target {
        name,
        run,
        panics: Panics::AreFaults,
    }
}

pub static TARGETS: &[Target] = &[
    target("answers", api::answers::check),
    target("api_keys", reloaded::api_keys),
    target("block_pool", block_pool::check),
    target("certificates", reloaded::certificates),
    target("chat", api::bodies::chat),
    Target {
        panics: Panics::AreCaught,
        ..target("chat_template", template::check)
    },
    target("completions", api::bodies::completions),
    target("etcd_entry", etcd::check),
    target("flight_record", traces::flight_record),
    target("gguf", model_files::gguf),
    target("http", api::http::check),
    target("kv_frames", wire::kv_frames),
    target("kv_greeting", kv_messages::greeting),
    target("kv_over_nccl", kv_messages::nccl),
    target("model_config", model_files::config),
    target("names", names::check),
    target("node_calls", node_calls::check),
    target("responses", api::bodies::responses),
    target("safetensors", model_files::safetensors),
    target("tokenizer_files", tokenizer::files),
    target("tokenizer_text", tokenizer::text),
    target("trace", traces::trace),
    target("wire", wire::messages),
];

/// The target of this name, ready to check inputs.
pub fn open(name: &str) -> Option<&'static Target> {
    count_panics();
    let target = TARGETS.iter().find(|target| target.name == name)?;
    // What a target makes once and keeps is not the memory of an input.
    (target.run)(&[]);
    Some(target)
}

impl Target {
    /// # Panics
    /// Something does not hold for this input.
    pub fn check(&self, data: &[u8]) {
        let (held, panics) = (MEMORY.current_usage(), PANICS.load(Ordering::SeqCst));
        MEMORY.reset_peak_usage();
        (self.run)(data);
        let taken = MEMORY.peak_usage().saturating_sub(held);
        let most = PEAK_BYTES_MAX + PEAK_BYTES_FOR_EACH_BYTE * data.len();
        assert!(taken <= most, "{taken} bytes of memory for {} bytes", data.len());
        if self.panics == Panics::AreFaults {
            // Also in other threads, and where something catches them.
            let more = PANICS.load(Ordering::SeqCst) - panics;
            assert!(more == 0, "{more} panics");
        }
    }
}

/// libFuzzer's own hook would end the process at each panic, also at those that are caught.
fn count_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        panic::set_hook(Box::new(|panic| {
            PANICS.fetch_add(1, Ordering::SeqCst);
            eprintln!("{panic}");
        }));
    });
}

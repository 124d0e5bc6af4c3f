//! What a load client is told: the server, the trace, and how the trace is sent. The verbs make it; `run` carries it out.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;
use workload::trace::Trace;

/// A request that has not ended by then is given up. It is the limit of `vllm bench serve`.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(6 * 60 * 60);

/// One run of load. Make it with [`LoadPlan::new`] and change what differs.
#[derive(Clone, Debug)]
pub struct LoadPlan {
    /// The run's name in reports: the arm's name, or the server's address.
    pub name: String,
    pub server: Server,
    /// Which requests are sent when.
    pub trace: Trace,
    pub prompts: Prompts,
    pub pace: Pace,
    /// Requests that are sent and answered first, so that their prefixes are cached when the run starts. Their prefix blocks are
    /// those of the trace.
    pub prefixes: Option<Trace>,
    /// Requests that are sent and answered before the clock of the run starts. Their prompts are not those of the trace.
    pub warm_up_requests: u32,
    /// Requests that are due in this time from the start do not count.
    pub warm_up: Duration,
    /// Requests that are due in this time before the last one do not count.
    pub cool_down: Duration,
    /// Asks the server to generate exactly as many tokens as the trace says.
    pub ignore_eos: bool,
    /// Share of the requests, 0 to 1, that the client gives up after a random part of their tokens.
    pub cancel_rate: f64,
    pub request_timeout: Duration,
    /// Prompts, cancels and everything else that is random follow from it.
    pub seed: u64,
    /// More members of each request's body, such as `temperature`.
    pub extra_body: Map<String, Value>,
    /// Asks a coordinator of baton for its records after the run. Other servers are not asked.
    pub reads_server_records: bool,
}

impl LoadPlan {
    /// Completions, open loop, exact lengths, greedy, nothing excluded.
    pub fn new(url: &str, trace: Trace) -> LoadPlan {
        LoadPlan {
            name: url.to_owned(),
            server: Server::new(url),
            trace,
            prompts: Prompts::TokenIds,
            pace: Pace::Open { max_concurrency: None },
            prefixes: None,
            warm_up_requests: 0,
            warm_up: Duration::ZERO,
            cool_down: Duration::ZERO,
            ignore_eos: true,
            cancel_rate: 0.0,
            request_timeout: REQUEST_TIMEOUT,
            seed: 0,
            extra_body: Map::from_iter([("temperature".to_owned(), Value::from(0.0))]),
            reads_server_records: true,
        }
    }
}

/// The server that gets the load, and what is known about it.
#[derive(Clone, Debug)]
pub struct Server {
    /// `http://HOST:PORT`, with or without `/v1`.
    pub url: String,
    pub endpoint: Endpoint,
    /// The path of the endpoint, if it is not the usual one.
    pub path: Option<String>,
    /// `None`: the first one that `/v1/models` lists.
    pub model: Option<String>,
    pub api_key: Option<String>,
    /// File of the authority whose certificate it has to have. `None`: any that this machine trusts.
    pub ca: Option<PathBuf>,
    /// More headers of each request.
    pub headers: Vec<(String, String)>,
    /// Its processes on this machine, by name, whose CPU is measured. Empty: the process that listens on the port, if it is
    /// on this machine, with its children and parents that are processes of baton.
    pub pids: BTreeMap<String, u32>,
}

impl Server {
    pub fn new(url: &str) -> Server {
        Server {
            url: url.to_owned(),
            endpoint: Endpoint::Completions,
            path: None,
            model: None,
            api_key: None,
            ca: None,
            headers: Vec::new(),
            pids: BTreeMap::new(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/completions`
    Completions,
    /// `/v1/chat/completions`
    Chat,
}

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// At the times of the trace, whatever the server does. With a limit, a request that finds `max_concurrency` others waits
    /// in the client, and this wait counts: its latency starts when it was due.
    Open { max_concurrency: Option<u32> },
    /// `users` send their next request when their answer has ended. The times of the trace do not count.
    Closed { users: u32 },
}

/// What stands in the prompts. The chat endpoint takes text only.
#[derive(Clone, Debug)]
pub enum Prompts {
    /// Token ids, drawn by seed and prefix block from a range that every model has. Lengths are exact.
    TokenIds,
    /// Words, about one token each.
    Words,
    /// The n-th text belongs to the trace's n-th request.
    Given(Arc<[String]>),
}

/// How far a run is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub requests: usize,
    pub sent: usize,
    pub completed: usize,
    /// Refused, failed or cancelled.
    pub not_completed: usize,
}

impl Progress {
    pub(crate) fn running(&self) -> usize {
        self.sent.saturating_sub(self.completed + self.not_completed)
    }
}

/// 2^64 by the golden ratio: the seeds of several runs are far from one another, and from those that somebody types.
const CONTENT_STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// The seed of the prompts in the run with this number, from 0, of several runs at one server. With one seed for all of them, a server with
/// a prefix cache would know the prompts of every run but the first.
pub(crate) fn content_seed(seed: u64, run: u64) -> u64 {
    seed.wrapping_add(CONTENT_STEP.wrapping_mul(run))
}

/// Who watches a run, and may end it early.
pub struct Observer<'a> {
    /// Called a few times a second.
    pub on_progress: Box<dyn FnMut(Progress) + 'a>,
    /// Cancel it, and the run ends with what it has; its environment then says `interrupted`.
    pub stop: CancellationToken,
}

impl Observer<'_> {
    pub fn silent() -> Observer<'static> {
        Observer {
            on_progress: Box::new(|_| {}),
            stop: CancellationToken::new(),
        }
    }
}

impl std::fmt::Debug for Observer<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Observer")
            .field("stop", &self.stop)
            .finish_non_exhaustive()
    }
}

//! Every setting of the coordinator. Flags, environment and file give the same keys (see `service_runtime::config`).

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::builder::{NonEmptyStringValueParser, PossibleValuesParser, TypedValueParser};
use identity::{ServerCertificate, TlsConfig};
use serde::Serialize;
use service_runtime::config::ByteSize;
use service_runtime::freed_memory::FreedMemory;
use service_runtime::http_guard::{GuardConfig, WebOrigin};
use service_runtime::metrics::config::MetricsConfig;
use service_runtime::process::ProcessConfig;
use service_runtime::spans::flavor::{OtelConfig, OtelFlavor};
use serving_core::cluster::{ClusterConfig, OnIllegalTransition, WhenUnsplit};
use serving_core::routing::RoutingPolicy;

use crate::flight_recorder::FlightRecordTarget;
use crate::registry::MembershipKind;
use crate::slo::{SloConfig, SloRules};
use crate::trace_viewer::TraceViewerUrl;

#[derive(Clone, Debug, clap::Args, Serialize)]
pub struct Config {
    /// HTTP API: host:port; port 0 is any free one
    #[arg(long, default_value = "127.0.0.1:8000")]
    pub listen: String,
    /// An address for operators alone: host:port. /admin, /metrics and the console are answered there, with the rest of the API, and
    /// no longer at listen. Unset: everything at listen
    #[arg(long, value_name = "HOST:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admin_listen: Option<String>,
    /// Membership endpoint that nodes join (gRPC): host:port
    #[arg(long, default_value = "127.0.0.1:7400")]
    pub control_listen: String,
    /// host:port at which nodes reach the membership endpoint, when it is not the control_listen address; they learn it from etcd
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_advertise: Option<String>,
    /// How nodes find this coordinator: embedded (they are told its address), or etcds://HOST:PORT/CLUSTER, where it registers
    #[arg(long, default_value = "embedded", value_name = "embedded|ETCD")]
    pub membership: MembershipKind,
    /// Name of this coordinator in its cluster, in logs, traces and announcements; unique, kept over restarts
    #[arg(long, default_value = "coordinator-0")]
    pub name: String,
    /// The served model, a GGUF file or a Hugging Face folder: its tokenizer and chat template are used here, its weights are
    /// not. `baton serve-coordinator` takes names, too, as `baton up` does
    #[arg(long)]
    pub model: PathBuf,
    /// Names that clients send in `model`, one or several. Nodes register with the first one, and answers, metrics and SLO
    /// rules have it; default: the name of the model's file or folder
    #[arg(long, value_delimiter = ',', value_parser = NonEmptyStringValueParser::new(), value_name = "NAME,..")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub served_model_name: Vec<String>,
    /// Longest prompt plus output in tokens; unset: what the model was trained for
    #[arg(long)]
    pub max_model_len: Option<u32>,
    /// Requests that may wait for a place, over both lanes
    #[arg(long, default_value_t = 2048)]
    pub max_queue_requests: usize,
    /// Longest wait for a place; then 429
    #[arg(long, default_value_t = 60_000)]
    pub queue_wait_ms_max: u64,
    /// Time from arrival to last token where the client does not say otherwise
    #[arg(long, default_value_t = 600_000)]
    pub request_time_limit_ms: u64,
    /// A node that is silent for this long is lost; nodes report at least twenty times as often
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u64).range(100..=600_000))]
    pub lease_ms: u64,
    /// Client connections, three quarters of them from one address at most; beyond them only probes are answered
    #[arg(long, default_value_t = 4096)]
    pub connections_max: usize,
    /// Largest HTTP body
    #[arg(long, default_value = "4MiB")]
    pub body_bytes_max: ByteSize,
    /// What all bodies above 64 KiB together may hold while they are read and tokenized; further ones get 503
    #[arg(long, default_value = "16MiB")]
    pub request_bytes_in_flight_max: ByteSize,
    /// Which node of a pool gets a request
    #[arg(long, value_parser = routing_policies(), default_value = "least-loaded")]
    pub routing: RoutingPolicy,
    /// Prompts of which a decode node lacks fewer tokens than this are computed there; 0 switches it off
    #[arg(long, default_value_t = 0)]
    pub local_prefill_below_tokens: u32,
    /// Let decode nodes compute prompts when no prefill node can
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub allow_local_prefill: bool,
    /// What /ready and `baton status` call a cluster without a prefill node or a usable pair, where decode nodes compute every
    /// prompt; requests are taken either way
    #[arg(long, value_enum, default_value = "ready")]
    pub unsplit_counts_as: UnsplitIs,
    /// Attempts of one request that may break before it fails, the first included; one that a node refuses, or that its
    /// drain ends, does not count
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub attempts_max: u32,
    /// Retries a minute that are always allowed; the budget is one for five requests where that is more
    #[arg(long, default_value_t = 10)]
    pub retries_free_per_minute: u64,
    /// Longest wait for a node to accept a request: a decode node's answer to `Open`, a prefill node's to `Prefill`
    #[arg(long, default_value_t = 60_000)]
    pub accept_timeout_ms: u64,
    /// Longest silence on both legs of a running request while its node reports no computing either
    #[arg(long, default_value_t = 60_000)]
    pub stream_silence_ms_max: u64,
    /// How long a drain takes at most. Running requests get it less half a second for goodbyes
    #[arg(long, default_value_t = 30_000)]
    pub drain_ms_max: u64,
    /// Which SLO profile judges a request without an `x-slo` header: model:NAME=PROFILE or lane:interactive=PROFILE
    #[arg(long, value_delimiter = ',', value_name = "RULE")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slo: Vec<String>,
    /// TOML file with the SLO profiles and the objective (docs/reference/slo.md); unset: the built-in ones
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slo_config: Option<PathBuf>,
    /// Generation requests that are remembered for /admin/requests, baton trace and the console
    #[arg(long, default_value_t = 10_000)]
    pub request_records: usize,
    /// Folder of reports that the console shows, as `baton compare --out FOLDER/NAME` writes them; unset: none
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reports_dir: Option<PathBuf>,
    /// Address of a trace in your trace viewer, with {trace_id} where the id belongs: the console's page of a request links to it
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_viewer_url: Option<TraceViewerUrl>,
    /// File that keeps every event and action of the placement, without the content of requests, for `baton replay`; it ends
    /// at its size [default size: 256MiB]. The file of the life before is kept as PATH.1
    #[arg(long, value_name = "PATH[:SIZE]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flight_record: Option<FlightRecordTarget>,
    /// File of the clients' API keys, which `baton keys` writes; it is read again when it changes. Unset: nobody is asked for a
    /// key
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_keys: Option<PathBuf>,
    /// File of the certificate, in PEM, that clients see at listen and admin_listen, followed by intermediate certificates if there are
    /// any; X.509 v3 for server authentication, of any authority (`baton certs issue DIR api/NAME` makes one). Unset: plain HTTP. It is
    /// read again when it changes; so is the next one
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_tls_cert: Option<PathBuf>,
    /// File of the private key of api_tls_cert in PEM
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_tls_key: Option<PathBuf>,
    /// Origins whose web pages may use the whole HTTP API, /admin included: SCHEME://HOST[:PORT]
    #[arg(long, value_delimiter = ',', value_name = "ORIGIN")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cors_origin: Vec<WebOrigin>,
    #[command(flatten)]
    #[serde(flatten)]
    pub tls: TlsConfig,
    #[command(flatten)]
    #[serde(flatten)]
    pub guard: GuardConfig,
    #[command(flatten)]
    #[serde(flatten)]
    pub otel: OtelConfig,
    /// Put prompts, answers and tool calls into traces, 16 KiB of each at most; whoever can read traces or /admin can read them
    #[arg(long)]
    pub trace_content: bool,
    #[command(flatten)]
    #[serde(flatten)]
    pub metrics: MetricsConfig,
}

/// [`WhenUnsplit`] by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnsplitIs {
    Ready,
    NotReady,
}

fn routing_policies() -> impl TypedValueParser<Value = RoutingPolicy> {
    let names = RoutingPolicy::ALL.iter().map(|policy| policy.name());
    PossibleValuesParser::new(names).try_map(|name| RoutingPolicy::by_name(&name).ok_or("no such policy"))
}

impl ProcessConfig for Config {
    const SERVICE: &'static str = "baton-coordinator";
    const FREED_MEMORY: FreedMemory = FreedMemory::GivenBack;
    fn name(&self) -> &str {
        &self.name
    }
    fn otel_flavors(&self) -> &[OtelFlavor] {
        &self.otel.otel_flavor
    }
}

/// A few reports may be late or lost before a lease ends.
const STATUSES_PER_LEASE: u32 = 20;

impl Config {
    pub fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms)
    }
    /// What judges requests.
    ///
    /// # Errors
    /// A file that cannot be used, or a rule that cannot be read.
    pub(crate) fn slo_rules(&self) -> anyhow::Result<SloRules> {
        let config = match &self.slo_config {
            Some(file) => SloConfig::load(file).context("--slo-config")?,
            None => SloConfig::default(),
        };
        SloRules::parse(config, &self.slo).context("--slo")
    }
    /// What clients see. `None`: plain HTTP.
    ///
    /// # Errors
    /// One of the two files is not set, or they cannot be used.
    pub(crate) fn api_certificate(&self) -> anyhow::Result<Option<ServerCertificate>> {
        let (certificate, key) = match (&self.api_tls_cert, &self.api_tls_key) {
            (None, None) => return Ok(None),
            (Some(certificate), Some(key)) => (certificate, key),
            (None, _) => bail!("api_tls_cert is not set: api_tls_cert and api_tls_key belong together"),
            (_, None) => bail!("api_tls_key is not set: api_tls_cert and api_tls_key belong together"),
        };
        Ok(Some(ServerCertificate::open(
            ("api_tls_cert", certificate),
            ("api_tls_key", key),
        )?))
    }
    pub fn when_unsplit(&self) -> WhenUnsplit {
        match self.unsplit_counts_as {
            UnsplitIs::Ready => WhenUnsplit::Ready,
            UnsplitIs::NotReady => WhenUnsplit::NotReady,
        }
    }
    /// The longest time between two reports of a node.
    pub fn status_interval(&self) -> Duration {
        self.lease() / STATUSES_PER_LEASE
    }
    pub fn cluster(&self) -> ClusterConfig {
        ClusterConfig {
            queue_requests_max: self.max_queue_requests,
            queue_wait_max: Duration::from_millis(self.queue_wait_ms_max),
            lease: self.lease(),
            model_name: self.served_model_name.first().cloned(),
            local_prefill_below_tokens: self.local_prefill_below_tokens,
            allow_local_prefill: self.allow_local_prefill,
            open_timeout: Duration::from_millis(self.accept_timeout_ms),
            prefill_start_timeout: Duration::from_millis(self.accept_timeout_ms),
            stream_silence_max: Duration::from_millis(self.stream_silence_ms_max),
            attempts_max: self.attempts_max,
            retries_free_per_minute: self.retries_free_per_minute,
            routing: self.routing,
            on_illegal_transition: OnIllegalTransition::FailRequest,
            // Nobody has had a reason to choose another time.
            overtake_max: ClusterConfig::default().overtake_max,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use service_runtime::config::{Outcome, Program, load};
    use service_runtime::metrics::table;

    use super::*;

    const PROGRAM: Program = Program {
        name: "coordinator",
        about: "The coordinator of a test.",
        version: "1.0.0",
    };

    #[test]
    fn the_buckets_reach_as_far_as_a_request_may_take_by_default() {
        let args = ["coordinator", "--model=m"].map(OsString::from);
        let Ok(Outcome::Run(loaded)) = load::<Config>(PROGRAM, args, &|_| None) else {
            panic!("the defaults are no configuration");
        };
        let longest_s = loaded.config.request_time_limit_ms as f64 / 1e3;
        let last = table::E2E.edges.last().copied().expect("edges");
        assert!(last >= longest_s, "{last} s of {longest_s} s");
    }
}

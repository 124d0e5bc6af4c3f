//! The server that gets the load, as several verbs of `baton bench` name it.

use std::path::Path;

use clap::Args;
use workload::trace::Trace;

use super::load::plan::LoadPlan;
use crate::http::{self, TrustArgs};

/// Requests before each run, so that connections, links and memory are there.
pub(super) const WARM_UP_REQUESTS: u32 = 4;

/// The server that gets the load.
#[derive(Clone, Debug, Args)]
pub(super) struct ServerArgs {
    /// Any OpenAI-compatible server.
    #[arg(
        long,
        alias = "base-url",
        env = http::URL_VARIABLE,
        default_value = http::URL_DEFAULT,
        value_name = "URL"
    )]
    pub url: String,
    #[command(flatten)]
    pub trust: TrustArgs,
    /// The model to ask for [default: the first one that the server lists].
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Sent as `Authorization: Bearer KEY`.
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Lengths, arrivals and prompts follow from it.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
}

impl ServerArgs {
    pub fn plan(&self, trace: Trace) -> LoadPlan {
        let mut plan = LoadPlan::new(&self.url, trace);
        plan.server.model.clone_from(&self.model);
        // A variable that is empty is no key.
        plan.server.api_key = self.api_key.clone().filter(|key| !key.is_empty());
        plan.server.ca = self.trust.ca().map(Path::to_path_buf);
        plan.seed = self.seed;
        plan.warm_up_requests = WARM_UP_REQUESTS;
        plan
    }
}

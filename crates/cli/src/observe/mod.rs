//! The verbs that look at a live cluster: `trace`, `tap`, `top`, `status`, `nodes`, `slo`. They read only the pages of
//! docs/reference/records.md. A drawing is a pure function of a page and of the terminal's [`look::Look`].

pub(crate) mod client;
pub(crate) mod cluster;
mod feed;
mod filter;
pub(crate) mod format;
mod look;
pub mod nodes;
mod records;
pub mod slo;
pub mod status;
pub(crate) mod table;
pub mod tap;
#[cfg(test)]
pub(crate) mod test_kit;
pub mod top;
pub mod trace;

use std::future::Future;

use anyhow::Context;
use clap::{Args, ValueEnum};

use crate::exit::Exit;
use crate::http::{self, TrustArgs};
use crate::signals::Signals;

#[derive(Clone, Debug, Args)]
pub struct UrlArgs {
    /// Where the coordinator listens.
    #[arg(
        long,
        env = http::URL_VARIABLE,
        default_value = http::URL_DEFAULT,
        value_name = "URL",
        value_hint = clap::ValueHint::Url
    )]
    pub url: String,
    #[command(flatten)]
    pub trust: TrustArgs,
}

impl UrlArgs {
    /// The server at `url`, which this machine has to trust if it has TLS.
    pub(crate) fn of(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            trust: TrustArgs::default(),
        }
    }
}

/// How a page is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    #[default]
    Table,
    /// The server's page, for scripts.
    Json,
}

#[derive(Clone, Copy, Debug, Default, Args)]
pub struct OutputArgs {
    /// A table, or the server's page as JSON.
    #[arg(short, long, value_enum, default_value_t = Output::Table, value_name = "FORMAT")]
    pub output: Output,
    /// The same as `-o json`.
    #[arg(long, conflicts_with = "output")]
    pub json: bool,
}

impl OutputArgs {
    pub fn format(&self) -> Output {
        if self.json { Output::Json } else { self.output }
    }
}

/// Runs a verb until it ends or a signal comes.
pub(crate) fn run_until_signal(verb: impl Future<Output = anyhow::Result<Exit>>) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let outcome = runtime.block_on(async {
        let mut signals = Signals::install().context("cannot listen for Ctrl-C")?;
        tokio::select! {
            outcome = verb => outcome,
            stop = signals.next() => Ok(stop.exit_early()),
        }
    });
    // A blocked read of the terminal must not delay the exit.
    runtime.shutdown_background();
    outcome
}

/// # Errors
/// Never for a page that came as JSON.
fn json(page: &serde_json::Value) -> anyhow::Result<String> {
    Ok(format!("{}\n", serde_json::to_string_pretty(page)?))
}

//! `baton doctor` without `--gpu`: whether a cluster can run on this machine. Every check ends as ok, warn, fail or not configured,
//! and says what to do. Nothing is started, fetched or changed.

mod collector;
mod etcd;
mod finding;
mod machine;
mod model;
mod ports;

use std::path::Path;

use self::finding::{Finding, Findings};
use super::DoctorArgs;
use crate::exit::Exit;
use crate::observe::run_until_signal;
use crate::stdout::print_result;
use crate::terminal::Terminal;

/// The model of `baton up` without `--model`.
const USUAL_MODEL: &str = "smollm2-135m";

/// # Errors
/// Stdout is closed.
pub(super) fn run(args: &DoctorArgs) -> anyhow::Result<Exit> {
    run_until_signal(async {
        let findings = Findings::new(look(args).await);
        print_result(&match args.json {
            true => format!("{}\n", serde_json::to_string(&findings)?),
            false => findings.text(Terminal::stdout()),
        })?;
        Ok(findings.exit())
    })
}

async fn look(args: &DoctorArgs) -> Vec<Finding> {
    let environment = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let model = args.model.as_deref().unwrap_or(Path::new(USUAL_MODEL));
    let mut findings = machine::look();
    findings.extend(model::look(model));
    findings.extend(ports::look(&args.listen));
    let membership = args.membership.clone().filter(|address| !address.is_empty());
    let membership = membership.or_else(|| etcd::of_nodes(&environment));
    findings.push(etcd::look(membership, &etcd::tls_of(&environment), etcd::ANSWERS_WITHIN).await);
    findings.push(collector::look(&environment).await);
    findings
}

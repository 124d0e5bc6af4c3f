//! The command line: one variant per verb, and the dispatch to the file that carries it out.

use std::process::ExitCode;

use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::bench::BenchArgs;
use crate::bench::transfer::peer::PeerArgs;
use crate::certs::CertsArgs;
use crate::chat::ChatArgs;
use crate::compare::CompareArgs;
use crate::completions::CompletionsArgs;
use crate::completions::live::LiveArgs;
use crate::doctor::DoctorArgs;
use crate::exit::{EXIT_STATUS_HELP, ErrorForm};
use crate::kernels::KernelsArgs;
use crate::keys::KeysArgs;
use crate::local_cluster::etcd::EtcdArgs;
use crate::logs::LogsArgs;
use crate::man::ManArgs;
use crate::model::ModelArgs;
use crate::observe::nodes::NodesArgs;
use crate::observe::slo::SloArgs;
use crate::observe::status::StatusArgs;
use crate::observe::tap::TapArgs;
use crate::observe::top::TopArgs;
use crate::observe::trace::TraceArgs;
use crate::operate::drain::DrainArgs;
use crate::operate::role::RoleArgs;
use crate::plan::PlanArgs;
use crate::record::RecordArgs;
use crate::replay::ReplayArgs;
use crate::report::ReportArgs;
use crate::serve::{self, ServeArgs};
use crate::simulate::SimulateArgs;
use crate::up::UpArgs;
use crate::version::VersionArgs;

const EXAMPLES: &str = "\
Examples:
  baton up                                a cluster on this machine: coordinator, one prefill, one decode node
  baton up --topology 2p2d                two of each
  baton chat Name the capital of France.
  baton status                            is it ready, and what to do if not
  baton top                               the live cluster; baton tap: each request as it ends
  baton logs decode-0 --follow            what a process of the running `baton up` says
  baton drain decode-0                    take a node out of service without losing a request
  baton role prefill-1 decode             make a node another role's, its weights kept
  baton trace last                        where the time of the last request went
  baton bench run --request-rate 4        load for any OpenAI-compatible server, with the times of its tokens
  baton bench sweep --find-knee 2         the last rate at which the SLO holds
  baton bench transfer                    how fast KV moves between two processes here
  baton record --out t.jsonl --for 10m    a trace of the traffic, without its text
  baton plan --help                       servers, cost, pools and KV transfers, each with its formula
  baton compare --quick --shape short     does disaggregation pay here? 15 minutes
  baton report --example --out report     what the report of a comparison looks like
  baton replay flight.record              what the coordinator decided in an incident, decided again
  baton keys create laptop                an API key for a client; baton up --api-keys keys.toml asks for one
  baton model list                        the models that are known, and which are here
  baton doctor                            whether this machine can serve; --gpu: whether each kernel is right on its GPU
  baton version --json                    what this binary is, for scripts
  baton completions bash > ~/.local/share/bash-completion/completions/baton";

const AFTER_HELP: &str = "\
--json prints one JSON document on stdout (tap and logs: one a line), and a failure as one line of JSON on stderr.
BATON_ENDPOINT is the URL of the server where --url is not given; BATON_API_KEY is sent to it, where it asks for a key.
bench run, sweep, matrix and interference send OPENAI_API_KEY instead, because they may measure anybody's server.
BATON_CA is the file of the authority that a server at https:// has to be certified by, where --ca is not given.";

#[derive(Debug, Parser)]
#[command(
    name = "baton",
    version = crate::version::VERSION,
    about = "Serves a language model from a prefill pool and a decode pool.",
    before_help = EXAMPLES,
    after_help = format!("{AFTER_HELP}\n{EXIT_STATUS_HELP}"),
    arg_required_else_help = true,
    disable_help_subcommand = true
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a cluster on this machine: one process per node, until Ctrl-C.
    Up(Box<UpArgs>),
    /// Talk to a cluster, with the timings of each answer.
    Chat(ChatArgs),
    /// Say whether the cluster is ready, and what to do if not.
    Status(StatusArgs),
    /// List the nodes with load, KV use, lease and clock.
    Nodes(NodesArgs),
    /// Watch the live cluster.
    Top(TopArgs),
    /// Print each request as it ends.
    Tap(TapArgs),
    /// Print what the processes of a running `baton up` have logged.
    Logs(LogsArgs),
    /// Draw where the time of a request went, or list the slowest.
    Trace(TraceArgs),
    /// Say how much of each error budget is left, and how fast it burns.
    Slo(SloArgs),
    /// Take a node out of service and wait until it has left.
    Drain(DrainArgs),
    /// Make a prefill node a decode node, or the other way round, without a new process.
    Role(RoleArgs),
    /// Make, list and revoke the API keys of clients.
    Keys(KeysArgs),
    /// Make the certificates by which the processes of a cluster know each other.
    Certs(CertsArgs),
    /// Fetch, list and describe model files.
    Model(ModelArgs),
    /// Measure a server under load, or parts of a cluster on this machine.
    Bench(BenchArgs),
    /// Record live traffic as a trace without content, to replay or to plan with.
    Record(RecordArgs),
    /// Plan a cluster: servers, cost, pools, KV transfers, with the formula of each figure.
    Plan(Box<PlanArgs>),
    /// Decide again what a flight record has, and compare every action.
    Replay(ReplayArgs),
    /// Run a cluster of any size in virtual time, with measured costs.
    Simulate(Box<SimulateArgs>),
    /// Say whether disaggregation pays for some traffic: the same load on several arms, with intervals and a verdict.
    Compare(Box<CompareArgs>),
    /// Make the report of a comparison, or of one run, from its JSON.
    Report(ReportArgs),
    /// Look at this machine: whether a cluster can run here, and what to do if not.
    Doctor(DoctorArgs),
    /// Compile the kernels of the GPU engine, on any machine.
    Kernels(KernelsArgs),
    /// Print the version of this binary.
    Version(VersionArgs),
    /// Print a shell completion script.
    Completions(CompletionsArgs),
    /// Write the manual pages into a folder.
    Man(ManArgs),
    /// Be the coordinator of a cluster: take requests, place them on nodes, stream the answers.
    #[command(disable_help_flag = true, long_about = serve::COORDINATOR_HELP)]
    ServeCoordinator(ServeArgs),
    /// Be a prefill node: compute prompts and hand their KV to decode nodes.
    #[command(disable_help_flag = true, long_about = serve::PREFILL_HELP)]
    ServePrefill(ServeArgs),
    /// Be a decode node: take KV from prefill nodes and generate tokens.
    #[command(disable_help_flag = true, long_about = serve::DECODE_HELP)]
    ServeDecode(ServeArgs),
    #[command(hide = true, disable_help_flag = true)]
    ServeEtcd(EtcdArgs),
    #[command(hide = true)]
    BenchTransferPeer(PeerArgs),
    #[command(hide = true)]
    CompleteLive(LiveArgs),
}

/// Reads the command line, runs its verb to its end, and says on stderr what went wrong.
pub fn main() -> ExitCode {
    let matches = match Cli::command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) => return crate::exit::report_usage(&error),
    };
    match Cli::from_arg_matches(&matches) {
        Ok(cli) => run(cli, error_form(&matches)),
        Err(error) => crate::exit::report_usage(&error.format(&mut Cli::command())),
    }
}

/// A verb that was asked for JSON fails in JSON, too.
fn error_form(matches: &ArgMatches) -> ErrorForm {
    // Most verbs have no such flag, which is an error here.
    let has_json_flag = matches!(matches.try_get_one::<bool>("json"), Ok(Some(true)));
    let format = matches.try_get_raw("output").ok().flatten();
    let is_json_format = format.is_some_and(|mut values| values.any(|value| value == "json"));
    match matches.subcommand() {
        _ if has_json_flag || is_json_format => ErrorForm::Json,
        Some((_, of_verb)) => error_form(of_verb),
        None => ErrorForm::Text,
    }
}

fn run(cli: Cli, error_form: ErrorForm) -> ExitCode {
    let outcome = match cli.command {
        Command::ServeCoordinator(args) => return serve::coordinator(args),
        Command::ServePrefill(args) => return serve::prefill_node(args),
        Command::ServeDecode(args) => return serve::decode_node(args),
        Command::ServeEtcd(args) => crate::local_cluster::etcd::become_etcd(&args),
        Command::Up(args) => crate::up::run(*args),
        Command::Chat(args) => crate::chat::run(args),
        Command::Status(args) => crate::observe::status::run(&args),
        Command::Nodes(args) => crate::observe::nodes::run(&args),
        Command::Top(args) => crate::observe::top::run(&args),
        Command::Tap(args) => crate::observe::tap::run(&args),
        Command::Logs(args) => crate::logs::run(&args),
        Command::Trace(args) => crate::observe::trace::run(&args),
        Command::Slo(args) => crate::observe::slo::run(&args),
        Command::Drain(args) => crate::operate::drain::run(&args),
        Command::Role(args) => crate::operate::role::run(&args),
        Command::Keys(args) => crate::keys::run(&args),
        Command::Certs(args) => crate::certs::run(&args),
        Command::Model(args) => crate::model::run(&args),
        Command::Bench(args) => crate::bench::run(&args),
        Command::Simulate(args) => crate::simulate::run(&args),
        Command::Compare(args) => crate::compare::run(*args),
        Command::BenchTransferPeer(args) => crate::bench::transfer::peer::run(&args),
        Command::Record(args) => crate::record::run(&args),
        Command::Plan(args) => crate::plan::run(&args),
        Command::Report(args) => crate::report::run(&args),
        Command::Replay(args) => crate::replay::run(&args),
        Command::Doctor(args) => crate::doctor::run(&args),
        Command::Kernels(args) => crate::kernels::run(&args),
        Command::Version(args) => crate::version::run(&args),
        Command::Completions(args) => crate::completions::run(&args, Cli::command()),
        Command::CompleteLive(args) => crate::completions::live::run(&args, &Cli::command()),
        Command::Man(args) => crate::man::run(&args, Cli::command()),
    };
    crate::exit::report(outcome, error_form)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    fn all_verbs(command: &clap::Command) -> Vec<clap::Command> {
        let verbs = command.get_subcommands();
        verbs
            .flat_map(|verb| std::iter::once(verb.clone()).chain(all_verbs(verb)))
            .collect()
    }

    #[test]
    fn every_verb_that_talks_to_a_server_finds_it_in_the_same_places() {
        let mut verbs = 0;
        for verb in all_verbs(&Cli::command()) {
            let default = [crate::http::URL_DEFAULT];
            let is_server = |arg: &&clap::Arg| arg.get_long() == Some("url") || arg.get_default_values() == default;
            let Some(url) = verb.get_arguments().find(is_server) else {
                continue;
            };
            verbs += 1;
            let name = verb.get_name();
            assert_eq!(url.get_long(), Some("url"), "{name}");
            assert_eq!(
                url.get_env().and_then(|env| env.to_str()),
                Some("BATON_ENDPOINT"),
                "{name}"
            );
            let ca = verb.get_arguments().find(|arg| arg.get_long() == Some("ca"));
            let ca = ca.and_then(|ca| ca.get_env()).and_then(|env| env.to_str());
            // `logs` reads files.
            assert!(name == "logs" || ca == Some("BATON_CA"), "{name}");
            // Without a URL `logs` looks at the one cluster that runs on this machine.
            assert!(name == "logs" || url.get_default_values() == default, "{name}");
        }
        assert!(verbs >= 14, "only {verbs} verbs seen: the search is broken");
    }

    #[test]
    fn a_verb_that_was_asked_for_json_fails_in_json() {
        let form = |words: &[&str]| error_form(&Cli::command().try_get_matches_from(words).expect("a command line"));
        for words in [
            &["baton", "status", "--json"][..],
            &["baton", "tap", "-o", "json"],
            &["baton", "model", "list", "--json"],
        ] {
            assert_eq!(form(words), ErrorForm::Json, "{words:?}");
        }
        for words in [
            &["baton", "status"][..],
            &["baton", "trace", "1", "-o", "otlp"],
            &["baton", "drain", "json"],
        ] {
            assert_eq!(form(words), ErrorForm::Text, "{words:?}");
        }
    }
}

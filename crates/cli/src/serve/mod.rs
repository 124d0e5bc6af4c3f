//! The verbs that are the processes themselves. `baton up` starts this binary again with them, and so does a service manager on
//! several hosts.

mod node;
mod packing;
mod settings;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use service_runtime::process;

use crate::model::{PullError, ResolvedModel, resolve};
use crate::signals;
use settings::NodeSettings;

pub(crate) const COORDINATOR_HELP: &str = "\
Is the coordinator of a cluster. It has the HTTP API, queues requests, places each one on a prefill and a decode node, and
streams the answers. It computes nothing: of the model it uses the tokenizer and the chat template.

Use it to run a cluster on several hosts, or under systemd, Docker or Kubernetes. `baton up` starts one by itself.

Most important:
  --model FILE|FOLDER|NAME   the model, the same on all processes (required)
  --listen HOST:PORT         where clients ask
  --control-listen HOST:PORT where nodes join
  --membership ETCD          register in etcd, where nodes and other coordinators find it
  --tls-cert, --tls-key, --tls-ca   its certificate, needed where other hosts reach it (baton certs)
  --api-tls-cert, --api-tls-key     the certificate that clients see: HTTPS
  --config FILE              the same settings as TOML; --print-config prints what holds and where it comes from

  baton serve-coordinator --model smollm2-135m --listen 0.0.0.0:8000 --control-listen 0.0.0.0:7400 \\
      --tls-cert coordinator-0.crt --tls-key coordinator-0.key --tls-ca ca.crt";

pub(crate) const PREFILL_HELP: &str = "\
Is a prefill node. It computes the KV cache of prompts in chunks and sends finished blocks to decode nodes while it computes
the next ones. `baton role` makes it a decode node later.

Use it to run a cluster on several hosts, or under systemd, Docker or Kubernetes. `baton up` starts its own nodes.

Most important:
  --model FILE|FOLDER|NAME   the model, the same on all processes (required)
  --name NAME                unique in the cluster, kept over restarts
  --coordinators HOST:PORT   the control port of each coordinator, or etcds://HOST:PORT/CLUSTER
  --listen, --advertise      where it listens, and the address at which others reach it
  --kv-cache-memory SIZE     memory for KV blocks
  --threads N, --device D    what computes: cores, or cuda:N
  --tls-cert, --tls-key, --tls-ca   its certificate, needed where other hosts reach it (baton certs)
  --config FILE              the same settings as TOML; --print-config prints what holds and where it comes from

  baton serve-prefill --model smollm2-135m --coordinators 10.0.0.1:7400 --listen 0.0.0.0:7410 --advertise 10.0.0.2:7410 \\
      --tls-cert prefill-0.crt --tls-key prefill-0.key --tls-ca ca.crt";

pub(crate) const DECODE_HELP: &str = "\
Is a decode node. It reserves KV blocks for a request, takes the prompt's KV from a prefill node, and generates the tokens of
all its requests in one batch. With --co-located it computes prompts itself, too. `baton role` makes it a prefill node later.

Use it to run a cluster on several hosts, or under systemd, Docker or Kubernetes. `baton up` starts its own nodes.

Most important:
  --model FILE|FOLDER|NAME   the model, the same on all processes (required)
  --name NAME                unique in the cluster, kept over restarts
  --coordinators HOST:PORT   the control port of each coordinator, or etcds://HOST:PORT/CLUSTER
  --listen, --advertise      where it listens, and the address at which others reach it
  --kv-cache-memory SIZE     memory for KV blocks, which decides how many requests run at a time
  --max-num-seqs N           sequences in one step
  --threads N, --device D    what computes: cores, or cuda:N
  --tls-cert, --tls-key, --tls-ca   its certificate, needed where other hosts reach it (baton certs)
  --config FILE              the same settings as TOML; --print-config prints what holds and where it comes from

  baton serve-decode --model smollm2-135m --coordinators 10.0.0.1:7400 --listen 0.0.0.0:7420 --advertise 10.0.0.3:7420 \\
      --tls-cert decode-0.crt --tls-key decode-0.key --tls-ca ca.crt";

/// The process's own command line, unchanged. Its config struct parses it, as in the process's own binary.
#[derive(Debug, Args)]
pub struct ServeArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    arguments: Vec<OsString>,
}

impl ServeArgs {
    /// The command line of the process's own binary. Whoever asks for help gets the verb's text before the list of all flags.
    fn behind(self, program: &str, help: &str) -> impl Iterator<Item = OsString> {
        if self.arguments.iter().any(|word| word == "--help" || word == "-h") {
            // A closed stdout is noticed by whoever prints the list.
            let _ = writeln!(crate::stdout::stdout(), "{help}\n");
        }
        std::iter::once(OsString::from(program)).chain(self.arguments)
    }
}

pub fn coordinator(args: ServeArgs) -> ExitCode {
    let program = coordinator::PROGRAM;
    process::main(
        program,
        args.behind(program.name, COORDINATOR_HELP),
        |mut config: coordinator::Config, shutdown| async move {
            find_model(&mut config.model, &mut config.served_model_name).await?;
            coordinator::run(config, shutdown).await
        },
    )
}

pub fn prefill_node(args: ServeArgs) -> ExitCode {
    let program = prefill_node::PROGRAM;
    process::main(
        program,
        args.behind(program.name, PREFILL_HELP),
        |mut config: prefill_node::Config, shutdown| async move {
            find_nodes_model(&mut config.node).await?;
            node::run(NodeSettings::of_prefill(config), shutdown).await
        },
    )
}

pub fn decode_node(args: ServeArgs) -> ExitCode {
    let program = decode_node::PROGRAM;
    process::main(
        program,
        args.behind(program.name, DECODE_HELP),
        |mut config: decode_node::Config, shutdown| async move {
            find_nodes_model(&mut config.node).await?;
            node::run(NodeSettings::of_decode(config), shutdown).await
        },
    )
}

async fn find_nodes_model(config: &mut ::node::NodeConfig) -> Result<(), PullError> {
    match &mut config.model {
        Some(model) => find_model(model, &mut config.served_model_name).await,
        None => Ok(()),
    }
}

/// `model` may be a name. It becomes a path, and a model of the catalogue keeps its name there.
async fn find_model(model: &mut PathBuf, served: &mut Vec<String>) -> Result<(), PullError> {
    // A path that is not text is no name.
    let Some(asked) = model.to_str().map(str::to_owned) else {
        return Ok(());
    };
    // The process that is served from here drains at a signal, and must not be ended by what watched the fetch.
    signals::are_handled_elsewhere();
    let found = tokio::task::spawn_blocking(move || resolve(&asked)).await;
    let ResolvedModel { path, name } = found.unwrap_or_else(|broken| std::panic::resume_unwind(broken.into_panic()))?;
    *model = path;
    if served.is_empty() {
        served.extend(name);
    }
    Ok(())
}

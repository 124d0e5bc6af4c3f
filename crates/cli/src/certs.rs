//! `baton certs`: makes a cluster's certificate authority and a certificate for each process.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use identity::{Authority, AuthorityError, CertifiedProcess, in_days};

use crate::exit::{Exit, ExitError, WithExit as _};
use crate::stdout::print_result;
use crate::terminal::say;

const EXAMPLES: &str = "\
Examples:
  baton certs init certs --cluster demo coordinator/coordinator-0 prefill/prefill-0 decode/decode-0
  baton certs issue certs decode/decode-1                a further node
  baton certs issue certs prefill,decode/node-0          a node that may change its role
  baton certs issue certs api/api --host baton.example.com --host 10.0.0.5    for the API: what clients see
  baton certs issue certs etcd/etcd-0 --host 10.0.0.1    for etcd: processes ask it as etcds://10.0.0.1:2379/CLUSTER
  baton certs issue certs decode/decode-0 --days 30      a new one for a process that runs: copy both files, it reads them
  baton serve-decode --name decode-0 --tls-cert decode-0.crt --tls-key decode-0.key --tls-ca ca.crt ..";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct CertsArgs {
    #[command(subcommand)]
    pub verb: CertsVerb,
}

#[derive(Debug, Subcommand)]
pub enum CertsVerb {
    /// Make an authority in a folder, and the first certificates.
    Init(InitArgs),
    /// Make certificates with the authority of a folder. One that is there is replaced by a new one.
    ///
    /// Files are called by the NAME alone. So api/NAME and etcd/NAME are refused where NAME is a process, and the other way round.
    Issue(IssueArgs),
}

#[derive(Debug, Args)]
pub struct InitArgs {
    /// The folder. It is made if it is not there.
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
    /// The cluster's name, which is in each certificate. Processes of other clusters are refused.
    #[arg(long, value_name = "NAME")]
    pub cluster: String,
    #[command(flatten)]
    pub processes: ProcessArgs,
}

#[derive(Debug, Args)]
pub struct IssueArgs {
    /// The folder of `baton certs init`.
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
    #[command(flatten)]
    pub processes: ProcessArgs,
}

#[derive(Debug, Args)]
pub struct ProcessArgs {
    /// Each process: its role and its name. Roles are coordinator, prefill, decode, and operator (for Prometheus, say). `api` is for
    /// what clients see, and `etcd` for etcd: they name hosts, and let nobody take part in the cluster.
    #[arg(required = true, value_name = "ROLE[,ROLE]/NAME")]
    pub processes: Vec<String>,
    /// A name or an address by which the API or etcd is called, beside localhost; of api/NAME and etcd/NAME alone.
    #[arg(long = "host", value_name = "HOST")]
    pub hosts: Vec<String>,
    /// How long the certificates are valid.
    #[arg(long, default_value_t = 365, value_name = "DAYS", value_parser = clap::value_parser!(u32).range(1..=3650))]
    pub days: u32,
}

pub fn run(args: &CertsArgs) -> anyhow::Result<Exit> {
    match &args.verb {
        CertsVerb::Init(args) => {
            let processes = processes(&args.processes)?;
            let authority = Authority::create(&args.folder, &args.cluster).map_err(in_words)?;
            issue(&authority, &processes, args.processes.days)
        }
        CertsVerb::Issue(args) => {
            let processes = processes(&args.processes)?;
            let authority = Authority::open(&args.folder).map_err(in_words);
            let authority = authority.with_context(|| {
                format!(
                    "{} has no authority that can be used; `baton certs init` makes one",
                    args.folder.display()
                )
            })?;
            issue(&authority, &processes, args.processes.days)
        }
    }
}

fn processes(args: &ProcessArgs) -> anyhow::Result<Vec<CertifiedProcess>> {
    let read = args.processes.iter().map(|text| text.parse().map_err(in_words));
    let mut processes: Vec<CertifiedProcess> = read.collect::<anyhow::Result<_>>()?;
    if !args.hosts.is_empty() && !processes.iter().any(CertifiedProcess::names_hosts) {
        let why = "--host is for the certificates that name hosts: api/NAME and etcd/NAME";
        return Err(anyhow::anyhow!(why)).exit(Exit::Usage);
    }
    for process in processes.iter_mut().filter(|process| process.names_hosts()) {
        let hosts = args.hosts.iter().map(String::as_str);
        *process = process.clone().with_hosts(hosts).map_err(in_words)?;
    }
    for (place, process) in processes.iter().enumerate() {
        if processes[..place].iter().any(|other| other.name == process.name) {
            let why = "a node with two roles is written once, as prefill,decode/NAME";
            return Err(anyhow::anyhow!("two processes are called {}: {why}", process.name)).exit(Exit::Usage);
        }
    }
    Ok(processes)
}

fn issue(authority: &Authority, processes: &[CertifiedProcess], days: u32) -> anyhow::Result<Exit> {
    let mut made = String::new();
    let issued = processes.iter().try_for_each(|process| {
        let files = authority.issue(process, in_days(days)).map_err(in_words)?;
        made += &format!("{}  {}\n", files.certificate.display(), files.key.display());
        anyhow::Ok(())
    });
    // Printed last: a reader that goes away (`| head -1`) must not leave the later ones unmade.
    print_result(&made)?;
    issued?;
    let ca = authority.certificate();
    say!(
        "give each host {} and the two files of its own process, and keep {} on this one: who has it can join cluster {}",
        ca.display(),
        ca.with_extension("key").display(),
        authority.cluster()
    );
    Ok(Exit::Ok)
}

fn in_words(error: AuthorityError) -> anyhow::Error {
    match error {
        AuthorityError::Cluster(_)
        | AuthorityError::Process(_)
        | AuthorityError::Host(_)
        | AuthorityError::Exists(_)
        | AuthorityError::OtherKind { .. } => anyhow::Error::new(ExitError::new(Exit::Usage, error.into())),
        AuthorityError::File { .. } | AuthorityError::Unreadable(_) | AuthorityError::Make(_) => error.into(),
    }
}

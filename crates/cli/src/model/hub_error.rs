//! What can go wrong between this machine and the hub, and what to do about it.

use std::fmt;
use std::path::PathBuf;

/// Names of files that an error shows.
const CHOICES_SHOWN_MAX: usize = 12;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    #[error(
        "{name} is not complete in {}, and {why}. On a machine with a network run `baton model pull {name}` and copy that \
         folder here (HF_HOME says where the cache is), or give --model the path of a GGUF file or of a folder with config.json, \
         tokenizer.json and safetensors",
        folder.display()
    )]
    Offline {
        name: String,
        /// The folder to fill.
        folder: PathBuf,
        why: Box<NoNetwork>,
    },
    #[error("cannot reach {url}: {cause}; check the network and HF_ENDPOINT, then try again")]
    Unreachable { url: String, cause: Unreachable },
    #[error(
        "the hub has no {name}: check the name and the revision, or whether the repository is private: then set HF_TOKEN. There \
         is no file or folder of this name here either"
    )]
    NotFound { name: String },
    #[error(
        "the hub does not give {name} to you ({status}): check the name; for a private model, or one whose terms you have accepted \
         on its page, set HF_TOKEN to your token, or run `hf auth login`"
    )]
    NotAllowed { name: String, status: u16 },
    #[error("{url} answers {status}; try again later, or check HF_ENDPOINT")]
    Status { url: String, status: u16 },
    #[error("{url} sends to another place {count} times or to none; check HF_ENDPOINT")]
    Redirects { url: String, count: usize },
    #[error("{url} answers something else than the hub does: {cause}; check HF_ENDPOINT")]
    NoListing { url: String, cause: BadListing },
    #[error(
        "{name} has no GGUF file, and not both config.json and model.safetensors (or shards of it); choose another model"
    )]
    NoModel { name: String },
    #[error("{name} has several GGUF files; say which one, as in {repository}:{}. They are: {}", choices[0], listed(choices))]
    Several {
        name: String,
        repository: String,
        choices: Vec<String>,
    },
    #[error(
        "{name} is none of the repository's GGUF files, or several of them have this quantisation. They are: {}",
        listed(choices)
    )]
    NoSuchFile { name: String, choices: Vec<String> },
    #[error(
        "all files of {name} that can be used are in {}, but a tokenizer.json or a file that the index names is not among them; \
         choose another model",
        folder.display()
    )]
    Incomplete { name: String, folder: PathBuf },
    #[error("{file} came with SHA-256 {found}, expected {expected}; it was removed: try again")]
    WrongHash {
        file: String,
        found: String,
        expected: String,
    },
    #[error("{file} came with {found} bytes, expected {expected}; it was removed: try again")]
    WrongSize { file: String, found: u64, expected: u64 },
    #[error("{file} stopped coming after {bytes} bytes: {cause}; try again, it goes on from there")]
    Cut {
        file: String,
        bytes: u64,
        cause: Unreachable,
    },
    #[error("no certificates to check the hub with: {0}; install the package ca-certificates, or set SSL_CERT_FILE")]
    Certificates(std::io::Error),
    #[error("the TLS of this program cannot be set up: {0}; this is a bug in baton")]
    Tls(rustls::Error),
    #[error("cannot start the runtime for the download: {0}; the system is out of resources")]
    Runtime(std::io::Error),
}

/// Why the network was not used.
#[derive(Debug)]
pub enum NoNetwork {
    /// `HF_HUB_OFFLINE` is set.
    Forbidden,
    Unreachable {
        endpoint: String,
        cause: Unreachable,
    },
}

/// How a server was not reached.
#[derive(Debug)]
pub enum Unreachable {
    /// It did not answer in time.
    Silent {
        seconds: u64,
    },
    Request(hyper_util::client::legacy::Error),
    Body(hyper::Error),
    /// No address can be made of it.
    NoUrl,
}

/// Why an answer is not the hub's list of files.
#[derive(Debug, thiserror::Error)]
pub enum BadListing {
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    #[error("more than {max} bytes")]
    TooLong { max: usize },
    #[error("its commit is no commit")]
    NoCommit,
}

impl HubError {
    /// The command line is wrong, not the machine.
    pub(crate) fn is_usage(&self) -> bool {
        matches!(self, HubError::Several { .. } | HubError::NoSuchFile { .. })
    }
}

impl fmt::Display for NoNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoNetwork::Forbidden => f.write_str("HF_HUB_OFFLINE is set"),
            NoNetwork::Unreachable { endpoint, cause } => {
                write!(f, "the hub at {endpoint} cannot be reached ({cause})")
            }
        }
    }
}

impl fmt::Display for Unreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cause: Option<&dyn std::error::Error> = match self {
            Unreachable::Silent { seconds } => return write!(f, "no answer within {seconds} s"),
            Unreachable::NoUrl => return f.write_str("this is no URL"),
            Unreachable::Request(error) => Some(error),
            Unreachable::Body(error) => Some(error),
        };
        // The reason is in the last cause.
        let mut separator = "";
        while let Some(error) = cause {
            write!(f, "{separator}{error}")?;
            (separator, cause) = (": ", error.source());
        }
        Ok(())
    }
}

fn listed(choices: &[String]) -> String {
    let shown: Vec<&str> = choices.iter().take(CHOICES_SHOWN_MAX).map(String::as_str).collect();
    let more = choices.len() - shown.len();
    match more {
        0 => shown.join(", "),
        _ => format!("{} and {more} more", shown.join(", ")),
    }
}

//! Whom a client of the command line trusts behind `https://`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use hyper_rustls::ConfigBuilderExt as _;
use rustls::{ClientConfig, RootCertStore, crypto};

use crate::exit::{Exit, WithExit as _};

/// The file of the authority, where `--ca` is not given.
pub(crate) const CA_VARIABLE: &str = "BATON_CA";

/// For every verb that talks to a server.
#[derive(Clone, Debug, Default, Args)]
pub struct TrustArgs {
    /// File of the authority, in PEM, whose certificate a server at https:// has to have [default: any that this machine trusts].
    #[arg(long, env = CA_VARIABLE, value_name = "FILE", value_hint = clap::ValueHint::FilePath, value_parser = file())]
    ca: Option<PathBuf>,
}

/// Takes empty text, too: a variable that is empty counts as one that is not set.
fn file() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

impl TrustArgs {
    pub(crate) fn new(ca: Option<PathBuf>) -> Self {
        Self { ca }
    }

    pub(crate) fn ca(&self) -> Option<&Path> {
        self.ca.as_deref().filter(|file| !file.as_os_str().is_empty())
    }
}

/// # Errors
/// `ca` cannot be read (usage), or the machine has no authorities.
pub(crate) fn config(scheme: Option<&str>, ca: Option<&Path>) -> anyhow::Result<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions()?;
    let builder = match (scheme, ca) {
        (Some("https"), Some(file)) => builder.with_root_certificates(authorities(file).exit(Exit::Usage)?),
        (Some("https"), None) => builder.with_native_roots().context(
            "this machine has no list of authorities (Debian, Ubuntu: apt-get install ca-certificates); name the server's in a file with --ca or BATON_CA",
        )?,
        // Without TLS no authorities are needed: the machine may have none.
        _ => builder.with_root_certificates(RootCertStore::empty()),
    };
    Ok(builder.with_no_client_auth())
}

fn authorities(file: &Path) -> anyhow::Result<RootCertStore> {
    let unusable = || format!("the file of the authority, {}, cannot be used", file.display());
    let mut roots = RootCertStore::empty();
    for certificate in identity::certificates("--ca", file)? {
        roots.add(certificate).with_context(unusable)?;
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Verb {
        #[command(flatten)]
        trust: TrustArgs,
    }

    #[test]
    fn an_empty_name_of_a_file_names_none() {
        let ca = |file| Verb::try_parse_from(["verb", "--ca", file]).unwrap().trust;
        assert_eq!(ca("").ca(), None);
        assert_eq!(ca("ca.crt").ca(), Some(Path::new("ca.crt")));
    }

    #[test]
    fn what_is_in_the_file_is_shown_to_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ca.crt");
        std::fs::write(&file, "-----BEGIN PRIVATE KEY\nSECRET\n-----END PRIVATE KEY-----\n").unwrap();
        let refused = format!("{:#}", config(Some("https"), Some(&file)).unwrap_err());
        assert!(refused.contains("ca.crt") && !refused.contains("PRIVATE"), "{refused}");
    }
}

//! `deny.toml` held against the packages that `cargo metadata` lists: licences, sources and bans, without cargo-deny.

use std::path::Path;
use std::process::Command;

use serde::Deserialize;

use crate::rules::Violation;

/// One package of the dependency tree.
#[derive(Clone, Debug, Deserialize)]
pub struct Package {
    name: String,
    #[serde(default)]
    license: Option<String>,
    /// `registry+URL` or `git+URL`; none for a crate of this repository.
    source: Option<String>,
}

impl Package {
    pub fn new(name: &str, license: &str, source: &str) -> Self {
        Self {
            name: name.to_owned(),
            license: Some(license.to_owned()),
            source: (!source.is_empty()).then(|| source.to_owned()),
        }
    }
}

/// What of `deny.toml` is checked here; cargo-deny checks the rest.
#[derive(Debug, Deserialize)]
pub struct Rules {
    licenses: Licenses,
    sources: Sources,
    bans: Bans,
}

#[derive(Debug, Deserialize)]
struct Licenses {
    allow: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Sources {
    allow_registry: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Bans {
    deny: Vec<Ban>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Ban {
    #[serde(rename = "crate")]
    name: String,
    /// The crate may be here once.
    #[serde(default)]
    deny_multiple_versions: bool,
}

impl Rules {
    pub fn read(root: &Path) -> Self {
        Self::parse(&std::fs::read_to_string(root.join("deny.toml")).expect("deny.toml"))
    }

    pub fn parse(text: &str) -> Self {
        toml::from_str(text).expect("deny.toml has the lists that are checked here")
    }

    pub fn violations(&self, packages: &[Package]) -> Vec<Violation> {
        let mut found = Vec::new();
        for Package { name, license, source } in packages {
            let license = license.as_deref().unwrap_or_default();
            if !is_allowed(license, &self.licenses.allow) {
                found.push(format!("{name}: deny.toml does not allow its licence `{license}`"));
            }
            let is_known = |source: &String| {
                let registry = source.strip_prefix("registry+");
                registry.is_some_and(|url| self.sources.allow_registry.iter().any(|allowed| allowed == url))
            };
            if source.as_ref().is_some_and(|source| !is_known(source)) {
                found.push(format!("{name}: deny.toml does not allow its source {source:?}"));
            }
        }
        for ban in &self.bans.deny {
            let count = packages.iter().filter(|package| package.name == ban.name).count();
            if count > usize::from(ban.deny_multiple_versions) {
                found.push(format!("{}: here {count} times, which deny.toml bans", ban.name));
            }
        }
        found
    }
}

/// All packages that building and testing on this kind of machine needs: cargo has them, so this asks no network.
pub fn packages() -> Vec<Package> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let out = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()))
        .args([
            "metadata",
            "--format-version=1",
            "--locked",
            "--offline",
            "--filter-platform",
            &platform,
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let metadata: Metadata = serde_json::from_slice(&out.stdout).expect("cargo writes JSON");
    metadata.packages
}

/// Whether an SPDX expression can be met by allowed licences alone. `/`, as old manifests have it, means OR.
fn is_allowed(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    either(&mut words, allowed) == Some(true) && words.next().is_none()
}

type Words<'a, 'b> = &'a mut std::iter::Peekable<std::str::SplitWhitespace<'b>>;

/// `None` where the expression ends too early.
fn either(words: Words<'_, '_>, allowed: &[String]) -> Option<bool> {
    let mut is_met = both(words, allowed)?;
    while words.next_if_eq(&"OR").is_some() {
        is_met |= both(words, allowed)?;
    }
    Some(is_met)
}

fn both(words: Words<'_, '_>, allowed: &[String]) -> Option<bool> {
    let mut is_met = one(words, allowed)?;
    while words.next_if_eq(&"AND").is_some() {
        is_met &= one(words, allowed)?;
    }
    Some(is_met)
}

fn one(words: Words<'_, '_>, allowed: &[String]) -> Option<bool> {
    if words.next_if_eq(&"(").is_some() {
        let is_met = either(words, allowed)?;
        return words.next_if_eq(&")").map(|_| is_met);
    }
    let mut license = words.next()?.to_owned();
    if words.next_if_eq(&"WITH").is_some() {
        license = format!("{license} WITH {}", words.next()?);
    }
    Some(allowed.contains(&license))
}

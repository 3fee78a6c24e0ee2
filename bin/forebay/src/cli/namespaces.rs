//! Options of `namespace`.

use clap::{ArgMatches, Args, Command, FromArgMatches, Subcommand};

use super::names::read_by_way_of;
use super::places::{PoolOnly, pool_text};
use crate::spec::{LOCAL_POOL, NamespaceSpec};

/// A namespace.
#[derive(Debug, Clone)]
pub struct OneNamespace {
    /// The namespace.
    pub spec: NamespaceSpec,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedNamespace {
    /// The namespace, POOL/NAMESPACE
    #[arg(value_name = "NAMESPACE")]
    named: Option<String>,

    /// The namespace's pool [default: local]
    #[arg(short, long, value_name = "POOL", value_parser = pool_text)]
    pool: Option<String>,

    /// The namespace, instead of the positional one, as rbd takes it
    #[arg(long, value_name = "NAMESPACE")]
    namespace: Option<String>,
}

impl TryFrom<TypedNamespace> for OneNamespace {
    type Error = String;

    fn try_from(TypedNamespace { named, pool, namespace }: TypedNamespace) -> Result<Self, String> {
        let spec = match (named, namespace) {
            // As rbd takes it, a positional argument beside the option is the pool.
            (Some(place), Some(name)) => {
                let place = place.strip_suffix('/').unwrap_or(&place);
                match pool {
                    Some(pool) if pool != place => {
                        return Err(format!(
                            "'{place}' and '--pool {pool}' name different pools; leave one of them out"
                        ));
                    }
                    _ => NamespaceSpec::new(place, &name)?,
                }
            }
            (Some(text), None) if text.contains('/') => {
                let spec: NamespaceSpec = text.parse()?;
                match pool.map(|pool| NamespaceSpec::new(&pool, &spec.namespace)).transpose()? {
                    Some(other) if other != spec => {
                        return Err(format!("'{text}' and '--pool {}' name different pools", other.pool));
                    }
                    _ => spec,
                }
            }
            (Some(name), None) | (None, Some(name)) => {
                NamespaceSpec::new(pool.as_deref().unwrap_or(LOCAL_POOL), &name)?
            }
            (None, None) => {
                return Err(format!("no namespace is named; write POOL/NAMESPACE, for example {LOCAL_POOL}/tenant1"));
            }
        };
        Ok(Self { spec })
    }
}

read_by_way_of!(TypedNamespace => OneNamespace);

/// Commands on namespaces.
#[derive(Debug, Subcommand)]
pub enum NamespaceCommand {
    /// Create a namespace: a part of a pool with images, groups and a trash of its own
    #[command(after_help = "Example:\n  forebay namespace create local/tenant1")]
    Create(OneNamespace),

    /// List the namespaces of a pool
    #[command(visible_alias = "list", after_help = "Example:\n  forebay namespace ls rbd")]
    Ls(PoolOnly),

    /// Remove an empty namespace
    #[command(visible_alias = "remove", after_help = "Example:\n  forebay namespace rm local/tenant1")]
    Rm(OneNamespace),
}

#[cfg(test)]
mod tests {
    use super::super::names::tests::read;
    use super::*;

    #[test]
    fn a_namespace_in_every_way() {
        for (arguments, want) in [
            (&["rbd/ns"][..], "rbd/ns"),
            (&["ns"], "local/ns"),
            (&["-p", "rbd", "ns"], "rbd/ns"),
            (&["-p", "rbd", "rbd/ns"], "rbd/ns"),
            (&["--namespace", "ns"], "local/ns"),
            (&["rbd", "--namespace", "ns"], "rbd/ns"),
            (&["--pool", "rbd", "--namespace", "ns"], "rbd/ns"),
        ] {
            let read: OneNamespace = read(arguments).unwrap_or_else(|error| panic!("{arguments:?}: {error}"));
            assert_eq!(read.spec.to_string(), want, "{arguments:?}");
        }
        for (arguments, says) in [
            (&[][..], "no namespace is named"),
            (&["-p", "x", "rbd/ns"], "different pools"),
            (&["y", "-p", "x", "--namespace", "ns"], "different pools"),
            (&["a/b/c"], "is not a namespace"),
            (&["rbd/"], "empty"),
            (&["rbd/.."], "namespace"),
        ] {
            let said = read::<OneNamespace>(arguments).expect_err("wrong");
            assert!(said.contains(says), "{arguments:?}: {said}");
        }
    }
}

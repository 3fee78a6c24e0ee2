//! Command `config`.

use super::shapes;
use super::with_session;
use crate::cli::{ConfigCommand, ConfigImageCommand, ConfigPoolCommand, GlobalArgs};
use crate::failure::Result;
use crate::ops::{ChangeOption, ConfigTarget, GetOption, ListOptions};
use crate::output::Output;

/// Manages overridden options.
pub fn run(global: &GlobalArgs, output: Output, command: ConfigCommand) -> Result<()> {
    match command {
        ConfigCommand::Image(command) => match command {
            ConfigImageCommand::Ls(options) => list(global, output, ConfigTarget::Image(options.image)),
            ConfigImageCommand::Get(options) => {
                get(global, output, GetOption { target: ConfigTarget::Image(options.image), key: options.key })
            }
            ConfigImageCommand::Set(options) => {
                let (target, value) = (ConfigTarget::Image(options.image), Some(options.value));
                change(global, output, ChangeOption { target, key: options.key, value })
            }
            ConfigImageCommand::Rm(options) => {
                let target = ConfigTarget::Image(options.image);
                change(global, output, ChangeOption { target, key: options.key, value: None })
            }
        },
        ConfigCommand::Pool(command) => match command {
            ConfigPoolCommand::Ls(options) => list(global, output, ConfigTarget::Pool(options.pool.0)),
            ConfigPoolCommand::Get(options) => {
                get(global, output, GetOption { target: ConfigTarget::Pool(options.pool.0), key: options.key })
            }
            ConfigPoolCommand::Set(options) => {
                let (target, value) = (ConfigTarget::Pool(options.of.pool.0), Some(options.value));
                change(global, output, ChangeOption { target, key: options.of.key, value })
            }
            ConfigPoolCommand::Rm(options) => {
                let target = ConfigTarget::Pool(options.pool.0);
                change(global, output, ChangeOption { target, key: options.key, value: None })
            }
        },
    }
}

fn list(global: &GlobalArgs, output: Output, target: ConfigTarget) -> Result<()> {
    let is_image = matches!(target, ConfigTarget::Image(_));
    let options = with_session(global, |session| session.call(ListOptions(target), |_| {}))?;
    output.print(&options, |options| shapes::config_options(options, is_image))
}

fn get(global: &GlobalArgs, output: Output, operation: GetOption) -> Result<()> {
    let value = with_session(global, |session| session.call(operation, |_| {}))?;
    output.print(&value, |value| value.value.clone())
}

fn change(global: &GlobalArgs, output: Output, operation: ChangeOption) -> Result<()> {
    let value = operation.value.clone();
    with_session(global, |session| session.call(operation, |_| {}))?;
    output.print(&value, |_| String::new())
}

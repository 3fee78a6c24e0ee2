mod crashes;
mod device;
mod model;
mod packed_rules;
mod properties;
mod setup_rules;
mod split_rules;
